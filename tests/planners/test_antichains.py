"""PipeDream's recurrence on antichain states beside all contiguous partitions of tiny graphs."""

from dataclasses import replace
from functools import cache
from math import inf, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from benchmarks.antichains import partition_graph
from benchmarks.pipedream import DATA, SAMPLES
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.pipedream import pipedream_graph
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.operators.opgraph import Operator, OpGraph, linearise
from stagewright.solvers.planners.baselines.hierarchy import Hierarchy, WorkerLevel, optimize
from stagewright.solvers.planners.baselines.pipedream import costs_of

NUMBERS = st.integers(0, 5).map(float)


def one_level(workers: int, bandwidth: float) -> Hierarchy:
    return Hierarchy((WorkerLevel(workers, bandwidth),), tuple(range(workers)))


def graph_of(operators, edges) -> OpGraph:
    """Operators of (forward, parameter bytes, output bytes) without a backward."""
    made = (
        Operator(f"n{v}", work, 0.0, parameters, output_bytes=output)
        for v, (work, parameters, output) in enumerate(operators)
    )
    return OpGraph("tiny", "by hand", tuple(made), tuple((f"n{a}", f"n{b}") for a, b in edges))


@st.composite
def cases(draw):
    n = draw(st.integers(1, 6))
    operators = draw(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=n, max_size=n))
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    levels = tuple(
        WorkerLevel(workers, draw(st.sampled_from([1.0, 2.0, 8.0]))) for workers in shape
    )
    return operators, edges, Hierarchy(levels, tuple(range(prod(shape))))


def stage_seconds(inside, reduced, m, overlapped):
    if overlapped:
        return max(inside, 2 * (m - 1) * reduced) / m
    return (inside + 4 * (m - 1) / m * reduced) / m


def closed_sets(n, edges):
    """The downsets, as bits."""
    return [
        some for some in range(1 << n) if all(some >> a & 1 or not some >> b & 1 for a, b in edges)
    ]


def crossing(operators, edges, done):
    """Bytes of the outputs of ``done`` that others read."""
    sent = {a for a, b in edges if done >> a & 1 and not done >> b & 1}
    return sum(operators[v][2] for v in sent)


def total(operators, parts, column):
    return sum(one[column] for v, one in enumerate(operators) if parts >> v & 1)


def least(operators, edges, hierarchy, overlapped, shape):
    """The least slowest stage of all sequences of sets of operators in which no edge goes back."""
    everything = (1 << len(operators)) - 1
    cuts = closed_sets(len(operators), edges) if shape != "data" else []

    def alone(k, before, after, m):
        """One stage on m components of level k."""
        if shape == "straight" and m > 1:
            return inf
        inside = total(operators, after & ~before, 0)
        if k:
            inside = best(k - 1, before, after, hierarchy.levels[k - 1].workers)
        reduced = total(operators, after & ~before, 1) / hierarchy.levels[k].bandwidth
        return stage_seconds(inside, reduced, m, overlapped)

    @cache
    def best(k, before, after, m):
        found = alone(k, before, after, m)
        between = (one for one in cuts if before & ~one == 0 == one & ~after)
        for state in between:
            if state in (before, after):
                continue
            moved = 2 * crossing(operators, edges, state) / hierarchy.levels[k].bandwidth
            for first in range(1, m):
                rest = best(k, state, after, m - first)
                found = min(found, max(alone(k, before, state, first), moved, rest))
        return found

    top = len(hierarchy.levels) - 1
    return best(top, 0, everything, hierarchy.levels[top].workers)


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("shape", ["any", "straight", "data"])
@given(cases())
@examples(80, quick=30)
def test_the_optimum_is_that_of_all_contiguous_partitions(overlapped, shape, case):
    operators, edges, hierarchy = case
    graph = graph_of(operators, edges)
    found = partition_graph(graph, hierarchy, overlapped=overlapped, shape=shape)
    assert found.slowest_seconds == pytest.approx(
        least(operators, edges, hierarchy, overlapped, shape)
    )
    if found.slowest_seconds == inf:
        assert not found.stages
        return
    names = [name for one in found.stages for name in one.operators]
    assert sorted(names) == sorted(operator.name for operator in graph.operators)
    place = {name: s for s, one in enumerate(found.stages) for name in one.operators}
    assert all(place[a] <= place[b] for a, b in graph.edges)
    if len(hierarchy.levels) == 1:
        assert slowest(graph, found.stages, hierarchy.levels[0].bandwidth, overlapped) == (
            pytest.approx(found.slowest_seconds)
        )


def slowest(graph, stages, bandwidth, overlapped):
    """The slowest stage or channel of the sets as they are, without the recurrence."""
    by_name = {operator.name: operator for operator in graph.operators}
    place = {name: s for s, one in enumerate(stages) for name in one.operators}
    worst = 0.0
    for s, one in enumerate(stages):
        its = [by_name[name] for name in one.operators]
        reduced = sum(operator.parameter_bytes for operator in its) / bandwidth
        work = sum(operator.forward_seconds + operator.backward_seconds for operator in its)
        worst = max(worst, stage_seconds(work, reduced, len(one.devices), overlapped))
        sent = {a for a, b in graph.edges if place[a] <= s < place[b]}
        worst = max(worst, 2 * sum(by_name[name].output_bytes for name in sent) / bandwidth)
    return worst


def test_a_cut_that_no_prefix_of_the_order_has():
    """Two branches, of 3 and 1 s each; the first stage has the first operators of both."""
    graph = graph_of([(3.0, 8e7, 0.0), (1.0, 8e7, 0.0)] * 2, [(0, 1), (2, 3)])
    chain = PipelineProblem(linearise(graph), uniform_servers(1, 3, Link(8e6)), 1)
    assert optimize(costs_of(chain), one_level(3, 8e6))[-1].slowest[0, -1, -1] == 4
    found = partition_graph(graph, one_level(3, 8e6))
    assert found.slowest_seconds == 3
    assert {"n1", "n3"} in [set(one.operators) for one in found.stages]


def test_too_many_states_are_refused():
    graph = graph_of([(1.0, 0.0, 1.0)] * 12, [])
    with pytest.raises(InputError, match=r"more than 1500 antichain states; linearise"):
        partition_graph(graph, one_level(2, 1.0))


@pytest.mark.skipif(not DATA.is_dir(), reason="the public profiles are not beside the checkout")
def test_gnmt_large_is_no_slower_than_the_reference_of_the_authors():
    """16 devices, no transfers, the formula of the public code: 0.058971 s (six decimals)."""
    profile = "gnmt_large"
    graph = pipedream_graph(DATA / f"{profile}.graph.txt", microbatch_size=SAMPLES[profile])
    operators = tuple(replace(one, output_bytes=0.0) for one in graph.operators)
    silent = replace(graph, operators=operators)
    found = partition_graph(silent, one_level(16, 1.25e9), overlapped=False)
    assert found.slowest_seconds <= 0.058971 + 5e-7
    assert sum(len(one.devices) for one in found.stages) == 16
