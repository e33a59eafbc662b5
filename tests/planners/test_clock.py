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
from stagewright.solvers.planners.steps.members import Member
from stagewright.solvers.planners.steps.proposal import Choices, NoPlan, Proposal, cost_of
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

    monkeypatch.setattr(auto.PublishedSearch, "run", late)
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


class TestTurns:
    """The portfolio with members that take all of their turns, on two clocks set by hand."""

    @pytest.fixture
    def run(self, monkeypatch):
        """The names of the turns, and the members, at so many wall seconds per CPU second."""

        def run(
            seconds: float,
            promises: dict[str, float],
            rate: float = 1.0,
            ends: tuple[str, ...] = (),
            finds: tuple[str, ...] = (),
        ) -> tuple[list[str], dict[str, Member]]:
            problem, now, turns = small_problem(), [0.0], list[str]()
            monkeypatch.setattr(auto, "monotonic", lambda: now[0] * rate)
            monkeypatch.setattr(auto, "process_time", lambda: now[0])
            monkeypatch.setattr(auto.planner, "ACTION_SECONDS", 0.0)
            portfolio = auto._Portfolio(
                problem, Limits(seconds), silent, 0.0, choices=Choices(), cpu_began=0.0
            )
            better = spp.plan_spp(problem, Limits(), silent)
            known = balanced.plan_balanced(problem, Limits(), silent)
            assert cost_of(problem, better) < cost_of(problem, known)
            portfolio.consider("balanced", lambda limits: known, 1.0)
            now[0] += 0.05

            def member(name: str) -> Member:
                def search(limits: Limits) -> Proposal | NoPlan:
                    turns.append(name)
                    now[0] += limits.seconds / rate * (0.1 if name in ends else 1.0)
                    return better if turns.count(name) == 2 and name in finds else NoPlan("no")

                return Member(name, search, portfolio.has_time, name < "f", promise=promises[name])

            portfolio.members = tuple(member(name) for name in promises)
            while (following := portfolio.next()) is not None:
                portfolio.take_turn(following)
            return turns, {one.name: one for one in portfolio.members}

        return run

    def test_times_without_gain_are_in_proportion_to_the_promises(self, run):
        promises = {"a": 0.08, "b": 0.04, "c": 0.01}
        turns, members = run(100.0, promises)
        assert turns[:2] == ["a", "a"]
        assert sum(one.spent for one in members.values()) == pytest.approx(100.0, rel=0.01)
        for one in members.values():  # a turn doubles its time, the last one may be cut
            share = one.spent / 100.0 * sum(promises.values()) / promises[one.name]
            assert 0.4 <= share <= 2.5

    def test_turns_are_the_same_on_a_busy_machine(self, run):
        promises = {"a": 0.08, "b": 0.05, "c": 0.01}
        turns, _ = run(20.0, promises)
        later, same = run(80.0, promises, rate=4.0)
        assert later[: len(turns) - 1] == turns[:-1]
        assert sum(one.spent for one in same.values()) == pytest.approx(20.0, rel=0.2)

    def test_a_member_that_gains_goes_on(self, run):
        turns, _ = run(10.0, {"a": 0.05, "b": 0.04}, finds=("b",))
        second = [i for i, name in enumerate(turns) if name == "b"][1]
        assert turns[second + 1] == "b"

    def test_a_search_that_ended_is_asked_again_if_it_begins_with_another_plan(self, run):
        """Searches named before f begin with the best plan."""
        turns, _ = run(10.0, {"a": 0.08, "z": 0.07, "b": 0.04}, ends=("a", "z"), finds=("b",))
        assert turns.count("z") == 1
        assert turns.count("a") == 2
        assert turns.index("a", 1) > [i for i, name in enumerate(turns) if name == "b"][1]

    def test_the_end_comes_when_all_have_ended(self, run):
        turns, _ = run(1000.0, {"a": 0.08, "z": 0.07}, ends=("a", "z"))
        assert turns == ["a", "z"]
