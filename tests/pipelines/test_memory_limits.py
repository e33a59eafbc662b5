"""The least memory, curves of memory, and free placements, against the oracle of its own."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_oracle import least_cost
from profiles import examples

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.bounds.placements import placement_bounds
from stagewright.formulations.pipelines.bounds.stages import plans_of
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.solvers.pipelines.least_memory import least_memory, memory_curve, memory_levels
from stagewright.solvers.pipelines.placing import placement_bound, search_placement

LIMITS = Limits(seconds=20, threads=2)
SLACK = 1 + 1e-9

quick = examples(12)


@st.composite
def small(draw):
    """Up to three stages with whole times and amounts; memory for all microbatches."""
    count = draw(st.integers(1, 3))
    device = draw(st.sampled_from(((0, 1), (0, 0), (0, 1, 0), (0, 1, 1), (0, 1, 2))))
    stages = len(device)

    def numbers(low, high):
        return tuple(float(draw(st.integers(low, high))) for _ in range(stages))

    split = draw(st.booleans())
    early, late = numbers(0, 2), numbers(0, 2)
    saved = tuple((a + b, a, b) for a, b in zip(early, late, strict=True))
    sends = tuple(float(draw(st.integers(0, 2))) if a != b else 0.0 for a, b in pairwise(device))
    held = [count * sum(saved[s][0] for s in range(stages) if device[s] == d)
            for d in range(1 + max(device))]  # fmt: skip
    return MakespanProblem(
        microbatches=count,
        forward=numbers(1, 4),
        backward=numbers(1, 4),
        send_forward=sends,
        send_backward=sends,
        reduce=(0.0,) * stages,
        in_flight=(count,) * stages,
        device=device,
        weight_gradient=numbers(1, 3) if split else None,
        saved=saved,
        memory=tuple(held),
    )


def least_at(problem, limit):
    """The least makespan within the limit; None if a microbatch does not fit."""
    memory = tuple(min(limit, own) for own in problem.memory)
    return least_cost(replace(problem, memory=memory))


@quick
@given(problem=small(), extra=st.integers(0, 6))
def test_the_least_memory_is_that_of_brute_force(problem, extra):
    most = least_cost(problem) + extra
    levels = memory_levels(problem).limits
    wanted = next(float(one) for one in levels if least_at(problem, float(one)) <= most)
    found = least_memory(problem, float(most), LIMITS)
    assert found.timetable is not None
    limited = replace(problem, memory=tuple(min(found.limit, own) for own in problem.memory))
    assert limited.evaluate(found.timetable) <= most * SLACK
    assert found.bound <= wanted * SLACK
    assert wanted <= found.limit * SLACK
    assert found.limit == pytest.approx(wanted)
    assert found.bound == pytest.approx(wanted)


def test_too_short_a_makespan_has_no_memory():
    problem = MakespanProblem(
        2, (1.0, 1.0), (1.0, 1.0), (0.0,), (0.0,), (0.0, 0.0), (2, 2),
        saved=((1.0, 1.0, 0.0),) * 2, memory=(2.0, 2.0),
    )  # fmt: skip
    assert least_memory(problem, 5.0, LIMITS).timetable is None
    found = least_memory(problem, 6.0, LIMITS)
    assert (found.limit, found.bound) == (2.0, 2.0)
    assert least_memory(problem, 8.0, LIMITS).limit == 1.0


def test_limits_without_a_common_unit_are_bounded_from_below():
    """Amounts 1 and pi: a limit between two of the tried ones is not excluded."""
    problem = MakespanProblem(
        3, (1.0, 1.0), (1.0, 1.0), (0.0,), (0.0,), (0.0, 0.0), (3, 3),
        saved=((1.0, 1.0, 0.0), (3.14159265, 3.14159265, 0.0)), memory=(3.0, 9.5),
    )  # fmt: skip
    levels = memory_levels(problem)
    assert not levels.exact
    assert levels.bound(0) == levels.limits[0] == levels.bound(1)
    found = least_memory(problem, least_cost(replace(problem, saved=(), memory=())) + 0.0, LIMITS)
    assert found.bound <= 2 * 3.14159265 * SLACK


@quick
@given(problem=small())
def test_a_curve_encloses_the_optimum_of_every_limit(problem):
    levels = memory_levels(problem).limits[:6].tolist()
    points = memory_curve(problem, levels, LIMITS, lambda points: None)
    assert [point.memory for point in points] == levels
    for point in points:
        limited = replace(problem, memory=(point.memory,) * len(problem.memory))
        assert limited.evaluate(point.timetable) == pytest.approx(point.cost)
        assert point.bound <= least_cost(limited) * SLACK
        assert point.cost >= least_cost(limited) / SLACK
    costs = [point.cost for point in points]
    assert costs == sorted(costs, reverse=True)


def on(problem, device):
    """The problem with its stages on other devices; a transfer takes 1."""
    moved = tuple(float(a != b) for a, b in pairwise(device))
    return replace(
        problem, device=device, send_forward=moved, send_backward=moved, saved=(), memory=()
    )


def placements(stages, devices):
    """All of them that use every device, numbered by first use."""
    for device in product(range(devices), repeat=stages):
        if list(dict.fromkeys(device)) == list(range(devices)):
            yield device


@quick
@given(problem=small(), objective=st.sampled_from(("makespan", "span")))
def test_placement_bounds_are_below_every_placement(problem, objective):
    problem = replace(problem, objective=objective)
    for devices in range(1, problem.stages + 1):
        placed = on(problem, problem.device)
        found = placement_bounds(placed, devices, plans_of(placed))
        bound = placement_bound(placed, devices, LIMITS).seconds
        assert bound >= max(one.seconds for one in found)
        for fewer in range(1, devices + 1):
            for device in placements(problem.stages, fewer):
                assert bound <= least_cost(on(problem, device)) * SLACK


def test_a_free_placement_is_found():
    """Two long stages in the middle and two short ones: the short ones share a device."""
    long, short = 6.0, 1.0
    problem = MakespanProblem(
        4, (short, long, long, short), (short, long, long, short), (0.0,) * 3, (0.0,) * 3,
        (0.0,) * 4, (4,) * 4, device=(0, 1, 0, 1),
    )  # fmt: skip

    def on_devices(device):
        return replace(problem, device=device)

    best = search_placement(on_devices, [(0, 1, 2, 0), (0, 0, 1, 2)], 0.0, Limits(seconds=2))
    assert len(set(best)) == 3
    assert best[1] != best[2]
    costs = {device: least_cost(on_devices(device)) for device in placements(4, 3)}
    assert costs[best] == min(costs.values())


def test_a_placement_whose_bound_equals_the_best_cost_is_no_better():
    """Only one placement has 9.5; the bounds of others are 10.5, as the cost of named ones."""
    problem = MakespanProblem(
        1, (1.0, 1.0, 0.5, 0.5), (0.5, 0.5, 2.0, 2.0), (0.0,) * 3, (0.0,) * 3, (0.0,) * 4, (1,) * 4,
        device=(0, 1, 0, 1), weight_gradient=(0.5, 0.5, 2.5, 2.5),
    )  # fmt: skip

    def on_devices(device):
        return replace(problem, device=device)

    costs = {device: least_cost(scaled(on_devices(device))) / 2 for device in placements(4, 2)}
    assert min(costs.values()) == 9.5
    best = search_placement(on_devices, [(0, 1, 0, 1), (0, 1, 1, 0)], 0.0, Limits(seconds=2))
    assert costs[best] == 9.5


def scaled(problem):
    """With times twice as long, which are whole numbers."""
    twice = {
        name: tuple(2 * one for one in getattr(problem, name))
        for name in ("forward", "backward", "weight_gradient")
    }
    return replace(problem, **twice)
