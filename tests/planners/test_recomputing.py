"""Pipelines that recompute as little as memory asks for."""

import math
from collections.abc import Iterator
from itertools import combinations, groupby, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import small_problem
from profiles import examples

from stagewright.formulations.forms.answers import Limits, silent
from stagewright.formulations.plans.memory import kept_bytes, stage_static_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.shards import share_count
from stagewright.graphs.machines.cluster import Device, from_matrix
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.general import StructureSearch
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planners.structures.recomputing import (
    FLIGHTS,
    SIZES,
    recomputing_pipelines,
)

MB = 1e6
MODES = ("none", "full", "layer")


@st.composite
def problems(draw: st.DrawFn) -> PipelineProblem:
    """Up to four layers on up to three devices of two kinds, in little memory."""
    amounts = st.integers(1, 9)
    layers = tuple(
        Layer(f"l{i}", draw(amounts) * MB, tuple(
            LayerCost(
                2, draw(amounts), 2 * MB * draw(amounts), draw(amounts) * MB, draw(amounts),
                device_kind=kind,
            )
            for kind in "ab"
        ))
        for i in range(draw(st.integers(1, 4)))
    )  # fmt: skip
    devices = [
        Device(f"d{v}", draw(st.sampled_from("ab")), draw(st.integers(20, 120)) * MB)
        for v in range(draw(st.integers(1, 3)))
    ]
    links = from_matrix(devices, [[1e9] * len(devices)] * len(devices), 0.0)
    return PipelineProblem(Chain("drawn", "test", 2, layers), links, draw(st.integers(1, 5)))


@given(problem=problems(), modes=st.sampled_from([MODES[:1], MODES[:2], MODES]))
@examples(300, quick=25)
def test_slowest_group_is_fastest(problem, modes) -> None:
    found = {}
    for structure in recomputing_pipelines(problem, modes):
        assert all(one.recompute in modes for one in structure.stages)
        groups = [[*each] for _, each in groupby(structure.stages, lambda one: one.devices)]
        found.setdefault(len(groups), max(_seconds(problem, group) for group in groups))
    for count in range(1, min(len(problem.chain), len(problem.cluster)) + 1):
        best = (_least(problem, modes, count, flight) for flight in FLIGHTS)
        least = next((one for one in best if one < math.inf), math.inf)
        assert found.get(count, math.inf) == pytest.approx(least)


def _least(problem, modes, count, flight) -> float:
    """The least seconds of the slowest of ``count`` groups of the first devices, if they fit."""
    layers, order = len(problem.chain), recursive_device_order(problem.cluster)
    names = [problem.cluster.devices[v].name for v in order]
    least = math.inf
    for cuts in combinations(range(1, layers), count - 1):
        for sizes in product(SIZES, repeat=count):
            if sum(sizes) > len(names):
                continue
            first, slowest = 0, 0.0
            for g, (ends, size) in enumerate(zip(pairwise((0, *cuts, layers)), sizes, strict=True)):
                held = min(problem.microbatches, math.ceil(flight * (count - g)))
                ways = _ways(problem, *ends, tuple(names[first : first + size]), modes)
                fitting = (_seconds(problem, one) for one in ways if _fits(problem, one, held))
                slowest, first = max(slowest, min(fitting, default=math.inf)), first + size
            least = min(least, slowest)
    return least


def _ways(problem, start, stop, devices, modes) -> Iterator[list[Stage]]:
    """A group's stages: its first layers with every mode."""
    for kind in ("split", "round-robin")[: 1 + (1 < len(devices) <= problem.microbatches)]:
        yield [Stage((start, stop), devices, kind)]
        for mode, cut in product(modes[1:], range(start + 1, stop + 1)):
            rest = [Stage((cut, stop), devices, kind)] if cut < stop else []
            yield [Stage((start, cut), devices, kind, mode), *rest]


def _seconds(problem, group) -> float:
    """Seconds per microbatch of the group's slowest device."""
    kinds = {problem.cluster.devices[problem.cluster.index[v]].kind for v in group[0].devices}
    costs = {kind: problem.costs(kind, share_count(group[0])) for kind in kinds}
    every = [
        sum(
            costs[kind].forward_seconds[l] * (1 + (one.recompute != "none"))
            + costs[kind].backward_seconds[l]
            for one in group
            for l in range(*one.layers)
        )
        for kind in kinds
    ]
    return max(every) / (len(group[0].devices) // share_count(group[0]))


def _fits(problem, group, count) -> bool:
    """Whether ``count`` microbatches in flight fit on each of the group's devices."""
    if any(share_count(one) > problem.most_replicas(*one.layers) for one in group):
        return False
    room = min(problem.memory_bytes[problem.cluster.index[v]] for v in group[0].devices)
    static = sum(stage_static_bytes(problem, one) for one in group)
    kept = [kept_bytes(problem, one) for one in group]
    held = -(-count // (len(group[0].devices) // share_count(group[0])))
    # Backwards run from the last stage to the first, each of which frees what it kept.
    during = [sum(k.saved_bytes for k in kept[: i + 1]) + k.working_bytes
              for i, k in enumerate(kept)]  # fmt: skip
    return static + (held - 1) * sum(k.saved_bytes for k in kept) + max(during) <= room


def test_general_begins_with_them_where_no_plan_is_known() -> None:
    problem = small_problem(layers=4, devices=2, microbatches=2)
    search = StructureSearch(problem, Limits(5), silent, Choices("full"))
    next(one for one in search.steps if search.structure is not None)
    assert search.structure in {*recomputing_pipelines(problem, MODES[:2])}
