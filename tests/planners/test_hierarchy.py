"""PipeDream's recurrence on one to three link levels beside recursion and integer programs."""

from functools import cache
from itertools import pairwise
from math import inf, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from scipy.optimize import Bounds, LinearConstraint, milp

from stagewright.graphs.machines.cluster import Link, from_matrix, uniform_servers
from stagewright.graphs.machines.topology import uniform_racks
from stagewright.solvers.planners.baselines.hierarchy import (
    Hierarchy,
    LayerCosts,
    WorkerLevel,
    hierarchy_of,
    optimize,
    placed,
)

NUMBERS = st.integers(0, 9).map(float)


@st.composite
def cases(draw, most_layers=6, levels=(1, 2, 3)):
    layers = draw(st.integers(1, most_layers))
    shape = [draw(st.integers(1, 3)) for _ in range(draw(st.sampled_from(levels)))]
    numbers = st.lists(NUMBERS, min_size=layers, max_size=layers).map(np.array)
    room = draw(st.integers(1, layers))
    costs = LayerCosts(
        draw(numbers), draw(numbers), draw(numbers),
        np.minimum(np.arange(layers) + room, layers),
    )  # fmt: skip
    made = tuple(WorkerLevel(workers, draw(st.sampled_from([1.0, 2.0, 8.0]))) for workers in shape)
    return costs, Hierarchy(made, tuple(range(prod(shape))))


def stage(compute, reduced, m, overlapped):
    if overlapped:
        return max(compute / m, 2 * (m - 1) / m * reduced)
    return compute / m + 4 * (m - 1) / m**2 * reduced


def least(costs, hierarchy, overlapped):
    """Every first stage, and the best of the rest: no tables, no limits on the cuts."""

    @cache
    def best(k, i, j, m):
        found = alone(k, i, j, m)
        for s in range(i + 1, j):
            for first in range(1, m):
                moved = 2 * costs.output_bytes[s - 1] / hierarchy.levels[k].bandwidth
                found = min(found, max(alone(k, i, s, first), moved, best(k, s, j, m - first)))
        return found

    def alone(k, i, j, m):
        if k:
            inside = best(k - 1, i, j, hierarchy.levels[k - 1].workers)
        else:
            inside = costs.work[i:j].sum() if j <= costs.most_stop[i] else inf
        reduced = costs.parameter_bytes[i:j].sum() / hierarchy.levels[k].bandwidth
        return stage(inside, reduced, m, overlapped)

    top = len(hierarchy.levels) - 1
    return best(top, 0, len(costs.work), hierarchy.levels[top].workers)


def value(costs, hierarchy, stages, k, overlapped):
    """What the recurrence says of stages: (start, stop, places of the devices in the order)."""
    size, level = hierarchy.size(k), hierarchy.levels[k]
    groups = []
    for start, stop, places in stages:
        mine = {place // size for place in places}
        if groups and groups[-1][0] == mine and k:
            groups[-1][1].append((start, stop, places))
        else:
            groups.append((mine, [(start, stop, places)]))
    assert sum(len(mine) for mine, _ in groups) == level.workers
    assert len(set().union(*(mine for mine, _ in groups))) == level.workers
    worst = max(
        [0.0, *(2 * costs.output_bytes[its[0][0] - 1] / level.bandwidth for _, its in groups[1:])]
    )
    for mine, its in groups:
        start, stop = its[0][0], its[-1][1]
        inside = costs.work[start:stop].sum()
        if k:
            first = min(mine)
            part = [(a, b, [p - first * size for p in c if p // size == first]) for a, b, c in its]
            inside = value(costs, hierarchy, part, k - 1, overlapped)
        reduced = costs.parameter_bytes[start:stop].sum() / level.bandwidth
        worst = max(worst, stage(inside, reduced, len(mine), overlapped))
    return worst


@pytest.mark.parametrize("overlapped", [True, False])
@given(cases())
@examples(300, quick=100)
def test_the_optimum_is_that_of_plain_recursion(overlapped, case):
    costs, hierarchy = case
    tables = optimize(costs, hierarchy, overlapped=overlapped)
    found = tables[-1].slowest[0, -1, -1]
    assert found == pytest.approx(least(costs, hierarchy, overlapped))
    if found == inf:
        return
    stages = [(one.start, one.stop, one.devices) for one in placed(tables, hierarchy)]
    assert [stages[0][0], *(stop for _, stop, _ in stages)][-1] == len(costs.work)
    assert all(before[1] == after[0] for before, after in pairwise(stages))
    assert value(costs, hierarchy, stages, len(tables) - 1, overlapped) == pytest.approx(found)


def by_integer_program(costs, hierarchy, k, i, j, m):
    """Intervals that cover the layers once and use m components; the least longest."""
    level, rows = hierarchy.levels[k], []
    for a in range(i, j):
        for b in range(a + 1, j + 1):
            inside = costs.work[a:b].sum() if b <= costs.most_stop[a] else inf
            if k:
                inside = by_integer_program(
                    costs, hierarchy, k - 1, a, b, hierarchy.levels[k - 1].workers
                )
            for count in range(1, m + 1):
                reduced = costs.parameter_bytes[a:b].sum() / level.bandwidth
                seconds = stage(inside, reduced, count, overlapped=True)
                moved = 2 * costs.output_bytes[b - 1] / level.bandwidth if b < j else 0.0
                if seconds < inf:
                    rows.append((a, b, count, max(seconds, moved)))
    if not rows:
        return inf
    layers = np.arange(i, j)[:, None]
    start, stop, count, seconds = np.array(rows).T
    covers = np.hstack([np.zeros((j - i, 1)), (start <= layers) & (layers < stop)])
    uses = np.concatenate([[0.0], count])[None, :]
    longest = np.hstack([np.ones((len(rows), 1)), -np.diag(seconds)])
    answer = milp(
        np.concatenate([[1.0], np.zeros(len(rows))]),
        integrality=np.concatenate([[0], np.ones(len(rows))]),
        bounds=Bounds(0, np.concatenate([[inf], np.ones(len(rows))])),
        constraints=[
            LinearConstraint(covers, 1, 1),
            LinearConstraint(uses, m, m),
            LinearConstraint(longest, 0, inf),
        ],
    )
    assert answer.status in (0, 2)  # optimal, infeasible
    return inf if answer.x is None else float(answer.fun)


@given(cases(4, levels=(1, 2)))
@examples(100, quick=20)
def test_the_optimum_is_that_of_integer_programs(case):
    costs, hierarchy = case
    top = len(hierarchy.levels) - 1
    workers = hierarchy.levels[top].workers
    expected = by_integer_program(costs, hierarchy, top, 0, len(costs.work), workers)
    found = optimize(costs, hierarchy)[-1].slowest[0, -1, -1]
    assert found == pytest.approx(expected, abs=1e-6)


def test_levels_of_clusters():
    links = Link(8e9), Link(4e9), Link(1e9)
    racks = hierarchy_of(uniform_racks(2, 3, 4, links))
    assert racks.levels == (WorkerLevel(4, 8e9), WorkerLevel(3, 4e9), WorkerLevel(2, 1e9))
    assert racks.order == tuple(range(24))
    assert hierarchy_of(uniform_servers(2, 4, *links[:2])).levels == (
        WorkerLevel(4, 8e9),
        WorkerLevel(2, 4e9),
    )
    assert hierarchy_of(uniform_servers(1, 4, links[0])).levels == (WorkerLevel(4, 8e9),)
    assert hierarchy_of(uniform_servers(4, 1, *links[:2])).levels == (WorkerLevel(4, 4e9),)
    names = uniform_servers(1, 3, links[0]).devices
    apart = [[None, 4e9, 1e9], [4e9, None, 1e9], [1e9, 1e9, None]]
    uneven = from_matrix(names, apart, servers=[[names[0].name, names[1].name], [names[2].name]])
    assert hierarchy_of(uneven).levels == (WorkerLevel(3, 1e9),)


def test_stages_inside_a_component_fit_where_their_sum_does_not():
    """Each of four layers fills a device; two servers of two devices have a stage per device."""
    costs = LayerCosts(np.ones(4), np.ones(4), np.zeros(4), np.arange(1, 5))
    servers = Hierarchy((WorkerLevel(2, 8.0), WorkerLevel(2, 1.0)), (0, 1, 2, 3))
    tables = optimize(costs, servers)
    assert tables[-1].slowest[0, -1, -1] == 1
    assert [one.devices for one in placed(tables, servers)] == [(0,), (1,), (2,), (3,)]


@given(cases())
@examples(60, quick=20)
def test_straight_pipelines_and_data_parallelism_are_restrictions(case):
    costs, hierarchy = case
    free = optimize(costs, hierarchy)[-1].slowest[0, -1, -1]
    for shape in ("straight", "data"):
        tables = optimize(costs, hierarchy, shape=shape)
        slowest = tables[-1].slowest[0, -1, -1]
        assert slowest >= free
        if slowest == inf:
            continue
        sizes = [len(one.devices) for one in placed(tables, hierarchy)]
        count = prod(level.workers for level in hierarchy.levels)
        assert sizes == ([1] * count if shape == "straight" else [count])
