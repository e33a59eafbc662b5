from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from makespan_oracle import brute_force_makespan
from profiles import examples
from strategies import random_makespan

from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.pipelines.blocks import block_starts, blocks_of, timetable_of
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.pipelines.makespan_models import CP_SAT, ByIntervals, earliest
from stagewright.formulations.pipelines.windows import WINDOWS
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.solvers.backends.backend import BACKENDS, solve
from stagewright.solvers.pipelines import scheduling
from stagewright.solvers.pipelines.forward_backward import dispatch, improve, rules_of
from stagewright.solvers.pipelines.list_scheduling import (
    LIST_KINDS,
    best_list_schedule,
    list_schedule,
)
from stagewright.solvers.pipelines.scheduling import solve_schedule

TIMES = ("forward", "backward", "send_forward", "send_backward", "reduce")
LIMITS = Limits(seconds=20, threads=2)


def scaled(problem, factor):
    return replace(problem, **{n: tuple(factor * t for t in getattr(problem, n)) for n in TIMES})


def unequal(stages, microbatches, extra, seed=0):
    random = np.random.default_rng(seed)

    def draw(low, high, count):
        return tuple(map(float, random.integers(low, high, count)))

    return MakespanProblem(
        microbatches,
        draw(5, 20, stages),
        draw(8, 45, stages),
        draw(1, 6, stages - 1),
        draw(1, 6, stages - 1),
        draw(0, 30, stages),
        tuple(min(microbatches, stages - s + extra) for s in range(stages)),
    )


def irregular(problem):
    """About the same times, no two of them multiples of a common unit."""
    random = np.random.default_rng(0)
    return replace(
        problem,
        **{n: tuple(t * random.uniform(0.999, 1.001) for t in getattr(problem, n)) for n in TIMES},
    )


# Better than every rule, and above every static bound: only a search finds and proves it.
HARD = unequal(4, 8, 0, seed=10)
# The same, and small enough for mixed-integer programs.
SMALL_BUT_OPEN = unequal(2, 4, 0, seed=41)


# The models


@examples(40, derandomize=True)
@given(random_makespan())
def test_intervals_reach_the_optimum(problem):
    model = ByIntervals(problem, best_list_schedule(problem)[1])
    answer = solve(model.apply(), limits=LIMITS)
    assert answer.status is Status.OPTIMAL
    assert answer.values is not None
    assert answer.objective == brute_force_makespan(problem)
    assert problem.evaluate(model.invert(answer.values)) == answer.objective


@examples(40, derandomize=True)
@given(random_makespan(max_stages=5, max_microbatches=6), st.sampled_from((1.0, 0.1, 1e-7, 1e12)))
def test_hint_horizon_and_bound_agree(problem, factor):
    problem = scaled(problem, factor)
    incumbent = list_schedule(problem, "eager")
    model = ByIntervals(problem, incumbent)
    form = model.apply()
    assert form.lower_bound <= form.horizon
    # Times are rounded down, so that the bound is one of the problem.
    assert form.horizon * model.unit <= problem.evaluate(incumbent) * (1 + 1e-12)
    hinted = model.invert(form.hint)
    assert problem.evaluate(hinted) <= problem.evaluate(incumbent) * (1 + 1e-9)
    assert model.ticks.evaluate(earliest(model.ticks, block_starts(problem, hinted))) <= (
        form.horizon
    )


def test_integer_times_are_taken_as_they_are():
    problem = unequal(3, 4, 1)
    model = ByIntervals(problem, list_schedule(problem, "pe"))
    assert model.unit == 1
    assert model.ticks == problem


@pytest.mark.parametrize("factor", [0.1, 1 / 7, 1e-6, 2.5e-3])
def test_times_with_a_common_unit_stay_exact(factor):
    problem = unequal(3, 4, 1)
    incumbent = list_schedule(scaled(problem, factor), "pe")
    model = ByIntervals(scaled(problem, factor), incumbent)
    assert scaled(model.ticks, model.unit / factor).forward == pytest.approx(problem.forward)
    assert model.apply().horizon * model.unit == pytest.approx(
        incumbent.makespan(scaled(problem, factor)), rel=1e-12
    )


def test_other_times_are_rounded_down_to_fine_ticks():
    problem = irregular(unequal(3, 4, 1))
    incumbent = list_schedule(problem, "pe")
    model = ByIntervals(problem, incumbent)
    assert 2**23 <= incumbent.makespan(problem) / model.unit <= 2**24
    for ticks, times in zip(model.ticks.forward, problem.forward, strict=True):
        assert 0 <= times / model.unit - ticks < 1


def test_the_order_counts_not_the_times():
    problem = unequal(4, 6, 1)
    timetable = list_schedule(problem, "1f1b")
    late = block_starts(problem, timetable) + 100.0
    again = earliest(problem, late)
    assert problem.evaluate(again) == problem.evaluate(timetable)
    assert again.forward[0, 0] == 0


@examples(40)
@given(random_makespan(max_stages=6, max_microbatches=8))
def test_eager_schedules_serve_transfers_in_the_order_of_their_arrival(problem):
    times = list_schedule(problem, "eager")
    for s in range(problem.stages - 1):
        arrivals = np.concatenate([
            times.forward[s] + problem.forward[s], times.backward[s + 1] + problem.backward[s + 1],
        ])  # fmt: skip
        starts = np.concatenate([times.send_forward[s], times.send_backward[s]])
        assert (np.diff(arrivals[np.lexsort((arrivals, starts))]) >= -1e-9).all()


def test_microbatches_are_renumbered_by_their_starts():
    problem = unequal(2, 3, 3)
    timetable = list_schedule(problem, "pe")
    shuffled = Timetable(
        *(part[:, [2, 0, 1]] for part in (
            timetable.forward, timetable.backward, timetable.send_forward, timetable.send_backward,
        )),
        timetable.reduce,
    )  # fmt: skip
    assert (block_starts(problem, shuffled) == block_starts(problem, timetable)).all()


# Forward-backward improvement


@examples(60, derandomize=True)
@given(random_makespan(max_stages=5, max_microbatches=8), st.integers(0, 2**31), st.floats(0, 1))
def test_dispatch_keeps_every_rule(problem, seed, eagerness):
    blocks = blocks_of(problem)
    shape = len(blocks.durations), problem.microbatches
    starts = dispatch(rules_of(blocks), np.random.default_rng(seed).random(shape), eagerness)
    problem.evaluate(timetable_of(problem, starts))


@examples(25, derandomize=True)
@given(random_makespan(max_stages=4, max_microbatches=6))
def test_improvement_never_worsens(problem):
    incumbent = list_schedule(problem, "1f1b")
    better = improve(problem, incumbent, target=0.0, limits=Limits(0.02))
    assert problem.evaluate(better) <= problem.evaluate(incumbent)


def test_improvement_stops_at_its_target_and_without_time():
    problem = unequal(4, 8, 4)
    incumbent = list_schedule(problem, "1f1b")
    cost = problem.evaluate(incumbent)
    assert problem.evaluate(improve(problem, incumbent, cost, Limits(60.0))) == cost
    assert problem.evaluate(improve(problem, incumbent, 0.0, Limits(0.0))) == cost
    assert problem.evaluate(improve(problem, incumbent, 0.9 * cost, Limits(60.0))) <= 0.95 * cost


# The assembly


@examples(25, derandomize=True)
@given(random_makespan(), st.sampled_from((1.0, 1 / 3)))
def test_optimal_is_the_optimum(problem, factor):
    problem = scaled(problem, factor)
    result = solve_schedule(problem, "optimal", LIMITS)
    assert result.status is Status.OPTIMAL
    assert result.cost == problem.evaluate(result.timetable)
    assert result.cost == pytest.approx(brute_force_makespan(problem), rel=1e-7)
    assert result.bound <= result.cost
    assert result.gap == pytest.approx(0, abs=1e-6)


@examples(20, derandomize=True)
@given(random_makespan(max_stages=6, max_microbatches=10))
def test_optimal_is_never_worse_than_a_list_schedule(problem):
    result = solve_schedule(problem, "optimal", Limits(seconds=0.05))
    assert result.timetable is not None
    for kind in LIST_KINDS:
        timetable = list_schedule(problem, kind)
        assert timetable is None or result.cost <= problem.evaluate(timetable)


@examples(40, derandomize=True)
@given(random_makespan(max_stages=5, max_microbatches=6))
def test_rules_are_checked_and_bounded(problem):
    for kind in ("gpipe", "1f1b", "pe"):
        result = solve_schedule(problem, kind, LIMITS)
        if result.timetable is None:
            assert kind == "gpipe"
            assert min(problem.in_flight) < problem.microbatches
            assert (result.status, result.cost, result.gap) == (Status.INFEASIBLE, None, None)
        else:
            assert result.cost == problem.evaluate(result.timetable)
            assert result.bound <= result.cost
            assert result.status is (Status.OPTIMAL if result.gap < 1e-9 else Status.FEASIBLE)


def test_cp_sat_closes_what_the_bounds_leave_open():
    result = solve_schedule(HARD, "optimal", replace(LIMITS, backend="cp-sat"))
    assert result.status is Status.OPTIMAL
    assert result.proved_by == CP_SAT
    assert result.bound == result.cost
    assert max(b.seconds for b in result.bounds if b.proved_by != CP_SAT) < result.cost
    assert "CpSolverResponse" in result.log
    assert result.progress[0].objective >= result.progress[-1].objective == result.cost
    assert result.rounding == 0


def test_the_windows_close_the_same_and_cp_sat_does_not_run():
    result = solve_schedule(HARD, "optimal", LIMITS)
    assert result.status is Status.OPTIMAL
    assert result.proved_by == WINDOWS
    assert result.cost == solve_schedule(HARD, "optimal", replace(LIMITS, backend="cp-sat")).cost
    assert result.log == ""


def test_rounding_is_reported():
    result = solve_schedule(irregular(HARD), "optimal", replace(LIMITS, backend="cp-sat"))
    assert result.status is Status.OPTIMAL
    assert result.proved_by == CP_SAT
    assert 0 < result.rounding < 1e-5 * result.cost
    assert 0 <= result.cost - result.bound <= result.rounding + 1e-9 * result.cost


def test_scaled_times_have_the_scaled_optimum():
    exact = solve_schedule(HARD, "optimal", LIMITS)
    result = solve_schedule(scaled(HARD, 1 / 7), "optimal", LIMITS)
    assert result.status is Status.OPTIMAL
    assert result.cost == pytest.approx(exact.cost / 7)


def test_the_search_stops_at_a_static_bound():
    result = solve_schedule(unequal(4, 8, 8), "optimal", Limits(seconds=60))
    assert result.status is Status.OPTIMAL
    assert result.proved_by != CP_SAT
    assert result.log == ""


def test_an_incumbent_is_not_lost():
    best = solve_schedule(HARD, "optimal", LIMITS)
    again = solve_schedule(HARD, "optimal", Limits(seconds=0.0), incumbent=best.timetable)
    assert (again.cost, again.source) == (best.cost, "incumbent")


def test_no_time_leaves_the_list_schedule():
    result = solve_schedule(unequal(8, 32, 0), "optimal", Limits(seconds=0.0))
    assert result.status is Status.FEASIBLE
    assert result.cost == best_list_schedule(unequal(8, 32, 0))[1].makespan(unequal(8, 32, 0))
    assert 0 < result.gap < 1


def test_an_incumbent_that_breaks_a_rule_is_refused():
    timetable = list_schedule(HARD, "pe")
    broken = replace(timetable, backward=np.zeros_like(timetable.backward))
    with pytest.raises(InvalidPlan):
        solve_schedule(HARD, "optimal", LIMITS, incumbent=broken)


def test_a_bound_above_the_cost_is_never_swallowed(monkeypatch):
    bound = scheduling.schedule_bounds(HARD)[0]
    monkeypatch.setattr(scheduling, "schedule_bounds", lambda _: (replace(bound, seconds=1e9),))
    with pytest.raises(InvalidPlan, match="below the bound"):
        solve_schedule(HARD, "pe", LIMITS)


def test_a_pipeline_of_no_duration():
    problem = scaled(unequal(2, 2, 1), 0.0)
    result = solve_schedule(problem, "optimal", LIMITS)
    assert (result.status, result.cost, result.bound, result.gap) == (Status.OPTIMAL, 0, 0, 0)


@examples(20, derandomize=True)
@given(random_makespan(max_stages=3, max_microbatches=3))
def test_time_reversed_the_optimum_is_the_same(problem):
    plain = replace(problem, reduce=(0.0,) * problem.stages)
    mirrored = replace(
        plain,
        forward=plain.backward,
        backward=plain.forward,
        send_forward=plain.send_backward,
        send_backward=plain.send_forward,
    )
    costs = [solve_schedule(p, "optimal", LIMITS).cost for p in (plain, mirrored)]
    assert costs[0] == costs[1]


@pytest.mark.parametrize("backend", ["highs", "pulp-cbc", "cvxpy"])
def test_another_backend_proves_the_same_optimum(backend):
    result = solve_schedule(SMALL_BUT_OPEN, "optimal", replace(LIMITS, backend=backend))
    assert result.status is Status.OPTIMAL
    assert result.cost == solve_schedule(SMALL_BUT_OPEN, "optimal", LIMITS).cost
    assert result.proved_by == BACKENDS[backend].solver


def test_a_backend_that_does_not_schedule_is_refused():
    with pytest.raises(InputError, match="'cvxpy-convex' solves no schedules; use cp-sat or highs"):
        solve_schedule(HARD, "gpipe", replace(LIMITS, backend="cvxpy-convex"))
    with pytest.raises(InputError, match="backend 'x' is unknown; use cp-sat or highs"):
        solve_schedule(HARD, "optimal", replace(LIMITS, backend="x"))


def test_every_backend_of_the_registry_is_known():
    assert list(BACKENDS) == [
        "cp-sat", "highs", "highs-ipm", "pulp-cbc", "cvxpy", "cvxpy-convex",
    ]  # fmt: skip
