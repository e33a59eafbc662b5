"""Bounds on the period, and the local search over allocations."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from periodic_plans import checked_plan
from plans import small_problem
from profiles import examples

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.patterns.one_f_one_b import (
    iteration_bound,
    least_period,
    one_f_one_b_star,
    period_bound,
)
from stagewright.formulations.patterns.pattern_problems import PatternProblems, pattern_problem
from stagewright.formulations.patterns.periodic_bounds import iteration_bounds
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.patterns.allocation_search import AllocationMoves, improve_allocation

NAMES = tuple(f"g{v}" for v in range(6))


def with_host(problem: PipelineProblem, rate: float) -> PipelineProblem:
    devices = tuple(replace(one, host_bytes_per_second=rate) for one in problem.cluster.devices)
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


@st.composite
def contiguous(draw: st.DrawFn) -> tuple[PipelineProblem, tuple[Stage, ...], int]:
    """A small problem with a contiguous partition on groups of one size."""
    size = draw(st.sampled_from((1, 2)))
    memory = draw(st.sampled_from((1.0e9, 1.3e9, 2e9, 16e9)))
    problem = small_problem(microbatches=draw(st.integers(2, 6)), memory_bytes=memory)
    count = draw(st.integers(1, 6 // size))
    cuts = sorted(draw(st.sets(st.integers(1, 5), min_size=count - 1, max_size=count - 1)))
    order = draw(st.permutations(NAMES))
    stages = tuple(
        Stage((start, stop), tuple(order[size * s : size * s + size]))
        for s, (start, stop) in enumerate(pairwise([0, *cuts, 6]))
    )
    return problem, stages, size


@given(contiguous())
@examples(60)
def test_no_plan_undercuts_a_bound(case: tuple[PipelineProblem, tuple[Stage, ...], int]):
    problem, stages, size = case
    asked = pattern_problem(problem, stages)
    period = least_period(asked)
    assert period >= period_bound(asked)
    for bound in iteration_bounds(problem, size):
        assert bound.seconds <= asked.iteration_seconds(period) * (1 + 1e-12), bound.proved_by
    if period < math.inf:
        checked_plan(problem, stages, one_f_one_b_star(asked, period))


def test_bounds_meet_their_closed_forms():
    # Without transfers, on one kind: six layers of equal work and activations on two devices.
    problem = small_problem(devices=2)
    costs = problem.costs("fast", 1)
    work = costs.forward_seconds + costs.backward_seconds
    m = problem.microbatches
    found = {bound.proved_by: bound.seconds / m for bound in iteration_bounds(problem, 1)}
    assert found["load of all devices"] == pytest.approx(work.sum() / 2)
    assert found["longest layer"] == pytest.approx(work.max())
    room = 32e9 - 5 * problem.chain.parameter_bytes.sum()
    behind = work[::-1].cumsum()[::-1]
    average = found["memory of all devices, averaged over the period"]
    assert average == pytest.approx(float(costs.saved_bytes @ behind) / room)


def test_recomputation_leaves_no_bound_on_activations():
    bounds = iteration_bounds(small_problem(), 1, ("none", "full"))
    assert not any("memory" in one.proved_by or "flight" in one.proved_by for one in bounds)


def test_less_memory_never_lowers_a_bound():
    plenty, little = (
        iteration_bounds(small_problem(memory_bytes=memory), 1) for memory in (4e9, 1.2e9)
    )
    assert all(a.seconds <= b.seconds for a, b in zip(plenty, little, strict=True))
    assert plenty != little


def test_search_only_improves_and_keeps_every_layer():
    problem = small_problem(memory_bytes=1.6e9)
    stages = tuple(Stage((s, s + 1), (NAMES[s],)) for s in range(6))
    figures = PatternProblems(problem)
    last = iteration_bound(figures.of(stages))
    groups = tuple((name,) for name in NAMES)
    found = list(improve_allocation(figures, AllocationMoves(groups), stages, 0.0, Limits(5)))
    assert found
    for one, asked, bound in found:
        assert [layer for stage in one for layer in range(*stage.layers)] == list(range(6))
        assert bound == iteration_bound(asked) < last
        last = bound


def test_search_ends_at_its_target():
    problem = small_problem()
    stages = (Stage((0, 6), ("g0",)),)
    figures = PatternProblems(problem)
    moves = AllocationMoves(tuple((name,) for name in NAMES))
    assert list(improve_allocation(figures, moves, stages, 1e9, Limits(5))) == []


def test_offloading_and_recomputation_save_memory():
    problem = with_host(small_problem(microbatches=8, memory_bytes=1.1e9), 20e9)
    stages = tuple(Stage((s, s + 1), (NAMES[s],)) for s in range(6))
    figures = PatternProblems(problem)
    groups = tuple((name,) for name in NAMES)

    def best(ways: tuple[str, ...]) -> float:
        start = iteration_bound(figures.of(stages))
        steps = improve_allocation(figures, AllocationMoves(groups, ways), stages, 0.0, Limits(5))
        return min((bound for _, _, bound in steps), default=start)

    plain = best(("none",))
    assert best(("none", "offload")) <= plain
    assert best(("none", "full")) <= plain


def test_offloaded_stages_pass_the_checker():
    problem = with_host(small_problem(microbatches=8), 12e9)
    cuts = ((0, 2), (2, 4), (4, 5), (5, 6))
    peaks = []
    for offload in (False, True):
        stages = [
            Stage(layers, (name,), offload=offload and s == 0)
            for s, (layers, name) in enumerate(zip(cuts, ("g0", "g1", "g3", "g4"), strict=True))
        ]
        asked = pattern_problem(problem, stages)
        pattern = one_f_one_b_star(asked, least_period(asked))
        plan = checked_plan(problem, stages, pattern)
        assert plan.predicted is not None
        peaks.append(plan.predicted.peak_memory_bytes["g0"])
    saved = problem.saved_bytes(0, 2, 1)
    assert peaks[0] - peaks[1] == pytest.approx(saved)  # three in flight, two of them here


def test_offloading_without_a_link_to_the_host_is_refused():
    stages = [Stage((0, 3), ("g0",), offload=True), Stage((3, 6), ("g1",))]
    with pytest.raises(InputError, match="host_bytes_per_second of the devices g0"):
        pattern_problem(small_problem(), stages)


def test_two_offloaded_stages_on_a_device_are_refused():
    problem = with_host(small_problem(), 12e9)
    stages = [
        Stage((0, 2), ("g0",), offload=True),
        Stage((2, 4), ("g1",)),
        Stage((4, 6), ("g0",), offload=True),
    ]
    with pytest.raises(InputError, match="only one of its stages"):
        pattern_problem(problem, stages)
