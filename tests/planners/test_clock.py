"""Planners look at the clock often enough, and have a plan early; on a clock that counts looks."""

from collections.abc import Callable

import pytest
from plans import small_problem

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Progress, silent
from stagewright.formulations.pipelines.joint import JointPlanning
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.solvers.pipelines import relaxation
from stagewright.solvers.pipelines.partition import passes as partition
from stagewright.solvers.pipelines.relaxation import FillAndDrain, relaxed_load_bound
from stagewright.solvers.planners import auto, balanced, exact, general, spp
from stagewright.solvers.planners.baselines import pipedream
from stagewright.solvers.planners.steps.proposal import NoPlan, Proposal
from stagewright.solvers.planners.structures import refine
from stagewright.solvers.planning import plan

COST = 1.0  # above every bound


def problem_of_servers(servers: int, devices: int) -> PipelineProblem:
    cluster = uniform_servers(servers, devices, Link(1e11), Link(1e10), memory_bytes=16e9)
    return PipelineProblem(analytic_model("bert-large", 4), cluster, microbatches=8)


class Clock:
    """A second passes with every look at the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (spp, partition, refine, balanced, auto, general):
            monkeypatch.setattr(module, "monotonic", self)
        monkeypatch.setattr(exact, "perf_counter", self)

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("seconds", [40.0, 200.0])
def test_spp_shares_its_time_among_its_steps(monkeypatch, seconds):
    """Each of its local searches alone looks at the clock 1000 times if it has the time."""
    problem = problem_of_servers(4, 4)
    clock = Clock(monkeypatch)
    assert isinstance(spp.plan_spp(problem, Limits(seconds), silent), Proposal)
    assert clock.now <= seconds + 30  # the steps that begin late look at it once or twice


def test_partitions_end_with_the_time(monkeypatch):
    """Passes that find nothing are not repeated for ever."""
    problem = problem_of_servers(4, 4)
    monkeypatch.setattr(partition.PartitionSearch, "test", lambda search, limit: None)
    clock = Clock(monkeypatch)
    answer = spp.plan_spp(problem, Limits(20.0), silent)
    assert isinstance(answer, NoPlan)
    assert not answer.proved
    assert "the time limit came before any partition" in answer.reason
    assert clock.now <= 100  # one or two looks for each number of stages


def test_the_joint_search_ends_while_it_lists_the_stages_of_many_devices():
    problem = problem_of_servers(8, 4)
    tree = JointPlanning(problem)
    looks = []

    def over() -> bool:
        looks.append(None)
        return len(looks) > 10

    some = list(tree.children(tree.root, over))
    assert len(looks) == 11
    assert len(some) <= 10 * len(problem.chain)
    most = problem.most_replicas(0, 1)
    assert all(len(child.stages[0].devices) <= most for child in tree.children(tree.root))


@pytest.mark.parametrize("wide", [False, True])
def test_the_relaxation_makes_as_many_passes_as_there_is_time_for(monkeypatch, wide):
    problem = small_problem(layers=8, devices=5)
    passes: list[float] = []

    def counted(form: object, size: int, limit: float, wide: bool, equal: int) -> bool:
        passes.append(limit)
        return original(form, size, limit, wide, equal)

    original: Callable[..., bool] = relaxation._fits_under
    monkeypatch.setattr(relaxation, "_fits_under", counted)
    whole = FillAndDrain(problem, wide).bound(COST)
    needed, bounds = len(passes), [relaxed_load_bound(problem)]
    assert needed > 3
    for count in range(needed + 1):
        passes.clear()
        search = FillAndDrain(problem, wide)
        bounds.append(search.bound(COST, seconds=(count + 0.5) * search.pass_seconds))
        assert len(passes) == count
    assert bounds == sorted(bounds)
    assert bounds[-1] == whole
    passes.clear()
    assert search.bound(COST) == whole  # nothing is computed again
    assert passes == []


def test_pipedream_is_left_out_if_its_tables_take_too_long():
    problem = small_problem()
    answer = pipedream.plan_pipedream(problem, Limits(1e-9), silent)
    assert isinstance(answer, NoPlan)
    assert not answer.proved
    assert "more than is left" in answer.reason
    assert isinstance(pipedream.plan_pipedream(problem, Limits(10.0), silent), Proposal)


def test_a_checked_plan_is_reported_before_the_first_search(monkeypatch):
    steps: list[Progress] = []

    class BegunError(Exception):
        pass

    def late(*_: object) -> NoPlan:
        raise BegunError

    monkeypatch.setattr(auto, "plan_published", late)
    problem = problem_of_servers(2, 2)
    with pytest.raises(BegunError):
        plan(problem, limits=Limits(60.0), on_progress=steps.append)
    assert check(problem, steps[-1].best()) == ()


def test_the_bound_of_the_relaxation_follows_the_first_plan_of_its_class():
    steps: list[Progress] = []
    result = plan(problem_of_servers(2, 2), "spp", Limits(5.0), steps.append)
    first = next(i for i, step in enumerate(steps) if step.objective is not None)
    initial, with_plan, tightened = steps[first - 1 : first + 2]
    assert initial.bound == with_plan.bound < tightened.bound
    assert with_plan.objective == tightened.objective
    assert tightened.plans.contains(result.plans) or result.plans.contains(tightened.plans)
    assert tightened.bound <= result.bound * (1 + 1e-9)
