"""Iterations of periodic plans: whole samples, all-reduces in turn, pauses, memory at the edge.

Tiny instances, on which planners and bounds are held against an enumeration of allocations and
patterns that shares no code with them (`periodic_oracles`).
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from periodic_oracles import brute_force_period, faults, naive_check, pattern_line
from periodic_plans import checked_plan
from profiles import examples

from stagewright.executor.drawing.periods import iteration_seconds
from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.patterns.joint_patterns import JointPatterns
from stagewright.formulations.patterns.pattern import Pattern, PatternProblem
from stagewright.formulations.patterns.pattern_problems import pattern_problem
from stagewright.formulations.patterns.periodic_bounds import iteration_bounds
from stagewright.formulations.plans.memory import Kept
from stagewright.formulations.plans.periodic import unroll_run
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan, Stage, load_plan
from stagewright.formulations.plans.plan_class import EVERY_PLAN
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.machines.cluster import (
    Device,
    Link,
    from_matrix,
    load_cluster,
    uniform_servers,
)
from stagewright.graphs.models.chain import Chain, Layer, LayerCost, load_model
from stagewright.solvers.patterns.joint_patterns import joint_optimum
from stagewright.solvers.patterns.pattern import best_pattern
from stagewright.solvers.pipelines.every_plan import every_plan_bounds
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import plan

PROOFS = Path(__file__).parents[2] / "../shared/data/proofs"
CLOSE = 3e-6
quick = examples(20, suppress_health_check=list(HealthCheck))

Times = tuple[float, float, float, float, float]  # forward, backward, update, saved, parameters


def problem_of(
    rows: list[Times],
    devices: int,
    microbatches: int,
    memory: float = 1e9,
    samples: int = 4,
    output: float = 0.0,
    min_samples: int | None = None,
) -> PipelineProblem:
    """Times in seconds, bytes as they are; links move 1 MB per second."""
    layers = tuple(
        Layer(
            f"l{i}",
            weights,
            (LayerCost(samples, there, saved, output, back, update_seconds=update),),
            min_samples,
        )
        for i, (there, back, update, saved, weights) in enumerate(rows)
    )
    names = [Device(f"g{v}", "a", memory) for v in range(devices)]
    cluster = from_matrix(names, [[1e6] * devices] * devices)
    chain = Chain("tiny", "made up", samples, layers, optimizer_bytes_per_parameter_byte=0.0)
    return PipelineProblem(chain, cluster, microbatches)


@st.composite
def problems(draw: st.DrawFn, devices: int = 3) -> PipelineProblem:
    whole = st.integers(1, 4).map(float)
    rows = st.tuples(
        whole, whole, st.sampled_from((0.0, 0.5, 2.0)), st.sampled_from((0.0, 1e6, 3e6)),
        st.sampled_from((0.0, 1e6, 4e6)),
    )  # fmt: skip
    return problem_of(
        draw(st.lists(rows, min_size=1, max_size=3)),
        draw(st.integers(1, devices)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from((8e6, 20e6, 1e9))),
        draw(st.sampled_from((1, 2, 3, 5))),
        draw(st.sampled_from((0.0, 1e6))),
    )


def groupings(problem: PipelineProblem, size: int) -> tuple[tuple[int, ...], ...]:
    """Devices are equal: which are grouped does not matter."""
    count = len(problem.cluster) // size
    return tuple(tuple(range(size * g, size * (g + 1))) for g in range(count))


def allocations(problem: PipelineProblem, size: int) -> Iterator[tuple[Stage, ...]]:
    """Every way to give layers to groups; neighbours on one group are one stage."""
    layers = len(problem.chain)
    groups = groupings(problem, size)
    for count in range(1, layers + 1):
        for inner in combinations(range(1, layers), count - 1):
            cuts = (0, *inner, layers)
            for owners in product(groups, repeat=count):
                if any(owners[i] == owners[i + 1] for i in range(count - 1)):
                    continue
                yield tuple(
                    Stage((cuts[i], cuts[i + 1]), tuple(f"g{v}" for v in owners[i]))
                    for i in range(count)
                )


def optimum(problem: PipelineProblem, size: int) -> float:
    """The shortest iteration with stages of so many devices; inf if there is none."""
    best = math.inf
    seen = set()
    for stages in allocations(problem, size):
        asked = pattern_problem(problem, stages)
        if asked not in seen:
            seen.add(asked)
            best = min(best, problem.microbatches * brute_force_period(asked) + asked.pause_seconds)
    return best


def group_sizes(problem: PipelineProblem) -> range:
    samples = problem.chain.microbatch_size
    least = max(layer.min_samples or 1 for layer in problem.chain.layers)
    return range(1, min(len(problem.cluster), samples // least) + 1)


# --- Bounds, optima, and planners ------------------------------------------------------------


@quick
@given(problems())
def test_bounds_and_joint_search_agree_with_the_enumeration(problem: PipelineProblem) -> None:
    for size in group_sizes(problem):
        least = optimum(problem, size)
        for bound in iteration_bounds(problem, size):
            assert bound.seconds <= least * (1 + CLOSE), bound.proved_by
        answer = joint_optimum(JointPatterns(problem, groupings(problem, size)), Limits(20.0))
        assert answer.complete
        assert answer.bound <= least * (1 + CLOSE)
        assert (answer.cost or math.inf) >= answer.bound
        updated = any(cost.update_seconds for layer in problem.chain.layers for cost in layer.costs)
        if not (updated and size > 1):  # all-reduces may go on in pauses: a bound alone
            assert (answer.cost or math.inf) == pytest.approx(least, rel=CLOSE)


@quick
@given(problems(devices=2))
def test_plans_lie_between_their_bounds_and_the_optimum(problem: PipelineProblem) -> None:
    result = plan(problem, "madpipe", Limits(10.0))
    least = min(optimum(problem, size) for size in group_sizes(problem))
    if result.plan is None:
        assert least == math.inf
        return
    assert result.cost is not None
    assert check(problem, result.plan) == ()
    assert naive_check(problem, result.plan) == []
    proof = result.plan.certificate
    assert proof is not None
    merged = [
        bound.seconds
        for bound in proof.bounds
        if bound.scope == "problem" and bound.plans.merged and bound.plans.equal_groups is not None
    ]
    assert all(bound <= least * (1 + CLOSE) for bound in merged)
    assert proof.every_bound_seconds <= least * (1 + CLOSE)
    assert result.cost <= least * (1 + 0.5)  # a planner, not a proof


# --- Patterns ----------------------------------------------------------------------------------


@st.composite
def patterns(draw: st.DrawFn) -> PatternProblem:
    """Stages that share groups, with all-reduces that often decide."""
    where = draw(st.sampled_from(((0, 0), (0, 1, 0), (0, 1), (0, 0, 0), (0,))))
    count = len(where)

    def several(low: int, high: int, number: int = count) -> tuple[float, ...]:
        return tuple(float(draw(st.integers(low, high))) for _ in range(number))

    return PatternProblem(
        forward=several(1, 3),
        backward=several(1, 3),
        there=(0.0,) * (count - 1),
        back=(0.0,) * (count - 1),
        devices=where,
        kept=(Kept(1.0),) * count,
        room_bytes=several(count, 5, max(where) + 1),
        reduce=several(0, 9),
        microbatches=draw(st.integers(1, 3)),
        pause_seconds=draw(st.sampled_from((0.0, 0.0, 1.0, 4.0))),
    )


@pytest.mark.parametrize("backend", ["highs", "cp-sat"])
@quick
@given(problem=patterns())
def test_patterns_with_all_reduces_in_turn(problem: PatternProblem, backend: str) -> None:
    # With a pause CP-SAT may not prove the optimum in any time; its bound must hold all the same.
    limits = Limits(20.0 if problem.pause_seconds == 0 else 2.0)
    answer, least = best_pattern(problem, limits, backend=backend), brute_force_period(problem)
    assert answer.bound <= least * (1 + CLOSE)
    if least == math.inf:
        assert answer.pattern is None
        return
    assert answer.pattern is not None
    assert problem.evaluate(answer.pattern) == answer.period
    assert faults(pattern_line(problem, answer.pattern)) == []
    if problem.pause_seconds == 0:
        assert answer.period == pytest.approx(least, rel=CLOSE)
    else:
        assert answer.period >= least * (1 - CLOSE)


# --- Rules -------------------------------------------------------------------------------------


def updated() -> tuple[PipelineProblem, PipelinePlan]:
    """Two stages of 1 + 2 s on devices of their own, with updates of 2 and 3 s."""
    problem = problem_of([(1.0, 2.0, 2.0, 1e6, 0.0), (1.0, 2.0, 3.0, 1e6, 0.0)], 2, 4)
    stages = [Stage((s, s + 1), (f"g{s}",)) for s in range(2)]
    asked = pattern_problem(problem, stages)
    assert asked.pause_seconds == 3.0
    pattern = best_pattern(asked, Limits(10.0)).pattern
    assert pattern is not None
    return problem, checked_plan(problem, stages, pattern)


def paused(given_plan: PipelinePlan, pause: float) -> PipelinePlan:
    assert isinstance(given_plan.schedule, PeriodicSchedule)
    schedule = replace(given_plan.schedule, pause_seconds=pause)
    return replace(given_plan, schedule=schedule, predicted=None)


def test_an_iteration_is_its_periods_and_a_pause() -> None:
    problem, found = updated()
    assert found.predicted is not None
    assert found.predicted.iteration_seconds == iteration_seconds(found) == 4 * 3 + 3
    assert found.predicted.bubble == pytest.approx(1 - (4 * 6 + 5) / (2 * 15))
    assert naive_check(problem, found) == []
    assert simulate(problem, found).iteration_seconds == pytest.approx(15)


def test_the_updates_of_a_device_need_their_pause() -> None:
    problem, found = updated()
    (violation,) = check(problem, paused(found, 2.9))
    assert violation.rule == "pause"
    assert naive_check(problem, paused(found, 2.9)) != []
    assert check(problem, paused(found, 7.0)) == ()


def test_devices_are_idle_for_a_pause_in_every_iteration() -> None:
    problem, found = updated()
    run = unroll_run(found, 16)
    for name in ("g0", "g1"):
        busy = sorted(
            (one.start_seconds, one.finish_seconds)
            for one in run.actions
            if one.device == name and "SEND" not in one.action
        )
        gaps = [later[0] - one[1] for one, later in pairwise(busy)]
        assert sum(gap >= 3.0 - 1e-9 for gap in gaps) >= 3
    result = simulate(problem, found)
    assert {one.action for one in result.actions} >= {"0UPDATE", "1UPDATE"}


def test_two_all_reduces_of_a_group_do_not_overlap() -> None:
    rows = [(1.0, 1.0, 0.0, 0.0, 2e6), (1.0, 1.0, 0.0, 0.0, 2e6), (1.0, 1.0, 0.0, 0.0, 0.0)]
    problem = problem_of(rows, 4, 2)
    stages = [
        Stage((0, 1), ("g0", "g1")), Stage((1, 2), ("g2", "g3")), Stage((2, 3), ("g0", "g1")),
    ]  # fmt: skip
    heavy = replace(problem.chain.layers[2], parameter_bytes=2e6)
    chain = replace(problem.chain, layers=(*problem.chain.layers[:2], heavy))
    problem = replace(problem, chain=chain)
    asked = pattern_problem(problem, stages)
    answer = best_pattern(asked, Limits(10.0))
    assert asked.reduce[0] == asked.reduce[2] == 2.0
    assert answer.period == 2.0  # 4 s of sums in two periods; of loads it would be 2 as well
    found = checked_plan(problem, stages, answer.pattern)
    assert isinstance(found.schedule, PeriodicSchedule)
    first = next(one for one in found.schedule.actions if one.action == "0REDUCE_GRAD")
    together = tuple(
        replace(one, start_seconds=first.start_seconds, shift=first.shift)
        if one.action == "2REDUCE_GRAD"
        else one
        for one in found.schedule.actions
    )
    broken = replace(found, schedule=replace(found.schedule, actions=together), predicted=None)
    assert "overlap" in {violation.rule for violation in check(problem, broken)}
    assert naive_check(problem, broken) != []


def test_packed_all_reduces_bound_the_iteration() -> None:
    # 2.25 s of sums on one group; loads alone would allow 1.5 s.
    rows = [(0.25, 0.25, 0.0, 0.0, 0.75e6)] * 3
    problem = problem_of(rows, 2, 1, samples=2)
    result = plan(problem, "madpipe", Limits(5.0), choices=Choices(group_size=2))
    assert result.cost is not None
    assert result.cost >= 2.25 - 1e-9


def test_shares_are_whole_samples() -> None:
    # Five samples on two devices: three on one of them.
    problem = problem_of([(5.0, 5.0, 0.0, 0.0, 0.0)], 2, 4, samples=5)
    stage = Stage((0, 1), ("g0", "g1"))
    asked = pattern_problem(problem, [stage])
    assert (asked.forward, asked.backward) == ((3.0,), (3.0,))
    few = problem_of([(5.0, 5.0, 0.0, 0.0, 0.0)], 4, 4, samples=5, min_samples=2)
    result = plan(few, "madpipe", Limits(5.0))
    assert result.plan is not None
    assert all(len(one.devices) <= 2 for one in result.plan.stages)
    with pytest.raises(InputError, match="group size 3: a stage can have 1 to 2"):
        plan(few, "madpipe", Limits(5.0), choices=Choices(group_size=3))


def test_groups_need_not_divide_the_devices() -> None:
    # Three samples on four devices: three of them share it.
    problem = problem_of([(3.0, 3.0, 0.0, 0.0, 0.0)], 4, 4, samples=3)
    result = plan(problem, "madpipe", Limits(5.0))
    assert result.cost == pytest.approx(4 * 2.0)
    assert result.status is Status.OPTIMAL


# --- Memory at the edge ------------------------------------------------------------------------


def test_weights_that_fill_the_memory_leave_room_for_nothing_saved() -> None:
    problem = problem_of([(1.0, 1.0, 0.0, 0.0, 4e6)], 1, 3, memory=12e6)
    for planner in ("1f1b-star", "madpipe"):
        result = plan(problem, planner, Limits(5.0))
        assert (result.status, result.cost) == (Status.OPTIMAL, pytest.approx(6.0))


@pytest.mark.parametrize("name", ["periodic171", "periodic195"])
def test_plans_at_the_edge_of_memory(name: str) -> None:
    if not PROOFS.exists():
        pytest.skip("the shared data are not here")
    given_plan = load_plan(PROOFS / f"{name}.plan.json")
    problem = PipelineProblem(
        load_model(PROOFS / f"{name}.model.json"),
        load_cluster(PROOFS / f"{name}.cluster.json"),
        given_plan.microbatches,
    )
    assert check(problem, replace(given_plan, digest=problem.digest)) == ()
    result = plan(problem, "madpipe", Limits(10.0))
    assert result.status is Status.OPTIMAL
    assert result.cost <= iteration_seconds(given_plan) * (1 + 1e-9)


def test_the_memory_of_two_stages_is_compared_as_by_the_checker() -> None:
    # Sums whose order counts: 0.3 is not 0.1 + 0.2.
    sizes = (0.1, 0.2, 0.7, 1.1, 1.3, 0.3)
    for weights in combinations(sizes, 2):
        chain_bytes = [3e6 * one for one in weights]
        memory = sum(3 * one for one in chain_bytes)
        problem = problem_of(
            [(1.0, 1.0, 0.0, 0.0, chain_bytes[0]), (1.0, 1.0, 0.0, 0.0, chain_bytes[1])],
            1, 2, memory=memory,
        )  # fmt: skip
        stages = [Stage((0, 1), ("g0",)), Stage((1, 2), ("g0",))]
        asked = pattern_problem(problem, stages)
        pattern = Pattern(4.0, (0.0, 1.0, 2.0, 3.0))
        fits = not list(asked._broken(pattern))
        try:
            checked_plan(problem, stages, pattern)
        except InvalidPlan:
            assert not fits
        else:
            assert fits


@pytest.mark.parametrize("period", [0.125, 0.15, 0.2])
def test_an_all_reduce_may_last_through_the_pause_of_another_iteration(period: float) -> None:
    """F 5 ms, B 10 ms, update 0.5 s on two devices; their all-reduce takes 1 s.

    Iterations of four periods and a pause may be as short as the all-reduce, though the step
    follows it: the step of the iteration before is done meanwhile.
    """
    cost = LayerCost(2, 0.01, 0.0, 0.0, backward_seconds=0.02, update_seconds=0.5)
    chain = Chain("one", "test", 2, (Layer("l", 1e9, (cost,)),))
    problem = PipelineProblem(chain, uniform_servers(1, 2, Link(1e9), memory_bytes=32e9), 4)
    result = plan(problem, "madpipe", Limits(5.0), choices=Choices(group_size=2))
    assert result.plan is not None
    assert isinstance(result.plan.schedule, PeriodicSchedule)
    schedule = replace(result.plan.schedule, period_seconds=period)
    shorter = replace(result.plan, schedule=schedule, predicted=None, certificate=None)
    assert check(problem, shorter) == ()
    seconds = 4 * period + schedule.pause_seconds
    assert seconds == pytest.approx(4 * period + 0.5)
    for bound in every_plan_bounds(problem):
        if bound.plans == EVERY_PLAN:
            assert bound.seconds <= seconds * (1 + 1e-9), bound
