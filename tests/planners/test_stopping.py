"""A stop token ends every search early; what was found by then is the answer."""

import math
import threading
from dataclasses import replace
from time import monotonic

import numpy as np
import pytest
from plans import AtFirstPlan, long_problem, small_problem
from scipy import sparse

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Progress, Status
from stagewright.formulations.forms.models import LinearProgram
from stagewright.formulations.pipelines.jobshop import JobShop
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.solvers.backends import cpsat
from stagewright.solvers.backends.backend import solve
from stagewright.solvers.backends.cpsat import run_stoppable
from stagewright.solvers.pipelines.jobshop import solve_jobshop
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.planning import PLANNERS, plan

LONG = 600.0  # seconds that a search takes which is not stopped


def set_token() -> threading.Event:
    token = threading.Event()
    token.set()
    return token


@pytest.mark.parametrize("planner", ["auto", "spp", "exact", "1f1b-star", "madpipe"])
def test_a_planner_that_is_stopped_keeps_its_best_checked_plan(planner):
    problem, watch = long_problem(), AtFirstPlan()
    began = monotonic()
    result = plan(problem, planner, Limits(LONG, stop=watch.stop), watch)
    assert monotonic() - began < LONG
    assert result.status is Status.INTERRUPTED
    assert check(problem, result.plan) == ()
    assert 0 < result.bound < result.cost
    assert result.gap == pytest.approx(1 - result.bound / result.cost)


@pytest.mark.parametrize("planner", ["auto", "spp", "exact"])
def test_a_planner_that_is_stopped_at_once_has_no_plan(planner):
    result = plan(small_problem(), planner, Limits(LONG, stop=set_token()))
    assert (result.status, result.plan, result.cost) == (Status.INTERRUPTED, None, None)
    assert "interrupt" in result.reason


@pytest.mark.parametrize("planner", PLANNERS)
def test_an_optimum_stays_optimal_and_no_plan_is_lost(planner):
    """Whatever a planner has in hand when it is stopped is checked."""
    problem = small_problem()
    result = plan(problem, planner, Limits(LONG, stop=set_token()))
    assert result.status in (Status.INTERRUPTED, Status.OPTIMAL)
    assert result.plan is None or check(problem, result.plan) == ()


def knapsacks(rows: int, columns: int) -> LinearProgram:
    """Many knapsacks at once, which branch and bound does not finish."""
    random = np.random.default_rng(0)
    weights = random.integers(1, 100, (rows, columns)).astype(float)
    return LinearProgram(
        cost=-random.integers(1, 100, columns).astype(float),
        matrix=sparse.csr_array(weights),
        row_lower=np.full(rows, -1e9),
        row_upper=np.floor(weights.sum(axis=1) / 3),
        lower=np.zeros(columns),
        upper=np.ones(columns),
        integral=np.ones(columns, dtype=bool),
    )


@pytest.mark.parametrize("run", [solve, cpsat.run_integers])
def test_solvers_are_stopped_while_they_work(run):
    form, watch = knapsacks(60, 120), AtFirstPlan()
    began = monotonic()
    limits = Limits(LONG, stop=watch.stop)
    answer = run(form, limits=limits, on_progress=watch)
    assert monotonic() - began < LONG
    assert answer.status is Status.FEASIBLE
    assert answer.bound < answer.objective


def test_schedules_and_job_shops_are_stopped():
    pipeline = MakespanProblem(
        24, (3.0, 7.0, 2.0, 5.0, 4.0, 6.0), (7.0, 5.0, 9.0, 6.0, 8.0, 4.0),
        (2.0,) * 5, (3.0,) * 5, (0.0,) * 6, (3, 3, 3, 2, 2, 1),
    )  # fmt: skip
    schedule = solve_schedule(pipeline, "optimal", Limits(LONG, stop=set_token()))
    assert schedule.status is Status.INTERRUPTED
    assert pipeline.evaluate(schedule.timetable) == schedule.cost
    random = np.random.default_rng(1)
    shop = JobShop(
        tuple(
            tuple((int(k), int(random.integers(1, 99))) for k in random.permutation(15))
            for _ in range(20)
        )
    )
    token = threading.Event()
    threading.Timer(1.0, token.set).start()
    found = solve_jobshop(shop, Limits(LONG, stop=token))
    assert found.status is Status.INTERRUPTED
    assert shop.evaluate(*found.schedule) == found.cost > found.bound


def test_an_interrupted_call_is_halted_and_the_interrupt_raised():
    halted = threading.Event()

    class Pressed:
        def is_set(self) -> bool:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stoppable(lambda: halted.wait(LONG), halted.set, Limits(stop=Pressed()))


def test_an_error_of_a_call_is_raised():
    with pytest.raises(ZeroDivisionError):
        run_stoppable(lambda: 1 / 0, lambda: None, Limits())


def test_no_time_is_left_once_stopped():
    token = threading.Event()
    limits = Limits(10.0, stop=token)
    assert (limits.left(4.0), limits.left(11.0), limits.stopped()) == (6.0, 0.0, False)
    token.set()
    assert (limits.left(4.0), limits.stopped()) == (0.0, True)
    assert replace(limits, seconds=math.inf).left(0.0) == 0.0


def test_progress_is_the_best_plan_and_a_bound_on_every_plan():
    problem = long_problem()
    for planner in ("auto", "1f1b-star"):
        steps: list[Progress] = []
        result = plan(problem, planner, Limits(2.0), steps.append)
        costs = [step.objective for step in steps if step.objective is not None]
        assert costs == sorted(costs, reverse=True)
        for plans in {step.plans for step in steps}:
            bounds = [step.bound for step in steps if step.plans == plans]
            assert bounds == sorted(bounds)
        assert costs[-1] == pytest.approx(result.cost)
        assert steps[-1].bound <= result.bound * (1 + 1e-9)
        assert [step.seconds for step in steps] == sorted(step.seconds for step in steps)
