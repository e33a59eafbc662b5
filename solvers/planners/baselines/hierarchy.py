"""PipeDream's recurrence over any number of link levels (Narayanan's thesis, 2.4.1).

Level 0 has devices, level 1 the servers that they are in, and so on; all components of a level are
equal. A stage of a level is computed by some of its components, each of which divides it further.

A pipeline is cut at states, the prefixes of a chain of layers. A stage is what one state has more
than an earlier one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stagewright.formulations.pipelines.bppm import StageChoice, prefix_sums, range_sums
from stagewright.formulations.prices.collectives import link_seconds
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.machines.cluster import Cluster

ROUNDING = 1e-9  # relative: of sums of times in another order
Shape = Literal["any", "straight", "data"]  # data: one stage on all devices


@dataclass(frozen=True, slots=True)
class WorkerLevel:
    """The components in each of the next level, and the slowest link between them in bytes/s."""

    workers: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Levels from the lowest; ``order`` has the devices of every component next to each other."""

    levels: tuple[WorkerLevel, ...]
    order: tuple[int, ...]

    def size(self, k: int) -> int:
        """The devices of a component of level ``k``."""
        return prod(level.workers for level in self.levels[:k])


@dataclass(frozen=True, slots=True, eq=False)
class LayerCosts:
    """The recurrence's input: times and bytes of L layers.

    Attributes
    ----------
    work
        Seconds of forward and backward of a microbatch, shape (L,).
    parameter_bytes, output_bytes
        Of every layer and of a microbatch's output, shape (L,).
    most_stop
        A stage that begins with layer i ends before layer ``most_stop[i] + 1``, shape (L,): no
        device has memory for more.
    """

    work: Floats
    parameter_bytes: Floats
    output_bytes: Floats
    most_stop: Ints

    def states(self) -> "CutStates":
        """The prefixes of the layers."""
        stops = np.arange(len(self.work) + 1)
        most = np.append(self.most_stop, len(self.work))
        return CutStates(
            work=prefix_sums(self.work),
            parameter_bytes=prefix_sums(self.parameter_bytes),
            crossing_bytes=np.append(0.0, self.output_bytes),
            stages=(stops[:, None] < stops) & (stops <= most[:, None]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class CutStates:
    """Where a pipeline may be cut: S prefixes of the layers, from none to all.

    Attributes
    ----------
    work
        Seconds of forward and backward of a microbatch, shape (S,).
    parameter_bytes, crossing_bytes
        Of the layers of a state, and of the outputs that others read, shape (S,).
    stages
        Whether one device may have what state j has more than state i, shape (S, S).
    """

    work: Floats
    parameter_bytes: Floats
    crossing_bytes: Floats
    stages: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class LevelTables:
    """A[i, j, m], the time of the slowest stage from state i to state j on m components.

    ``split[i, j, m]`` is the state before the last stage (i for a single stage) and
    ``last[i, j, m]`` the components of that stage. The highest level has i = 0 only.
    """

    slowest: Floats
    split: NDArray[np.int32]
    last: NDArray[np.int32]

    def stages(self, start: int, stop: int, workers: int) -> list[tuple[int, int, int]]:
        """(state before, state after, components) of the stages between two states, in order."""
        found = []
        while True:
            split = int(self.split[start, stop, workers])
            last = int(self.last[start, stop, workers])
            found.append((split, stop, last))
            if split == start:
                return found[::-1]
            stop, workers = split, workers - last


def hierarchy_of(cluster: Cluster) -> Hierarchy:
    """Devices, servers, and larger components as their links tell, such as racks.

    A grouping is a level if all its components are equal; unequal servers are no level, nor is what
    is made of them.
    """
    groupings = _groupings(cluster)
    order = tuple(int(v) for v in np.lexsort([np.arange(len(cluster)), *groupings]))
    counts = [len(cluster), *(len(np.unique(one)) for one in groupings), 1]
    everything = np.zeros(len(cluster), dtype=np.int64)
    levels = [
        WorkerLevel(many // few, _slowest(cluster, labels))
        for many, few, labels in zip(counts, counts[1:], [*groupings, everything], strict=False)
    ]
    return Hierarchy(tuple(levels), order)


def _groupings(cluster: Cluster) -> list[Ints]:
    """Labels of the devices by component, from servers up, each of equal components."""
    servers = np.zeros(len(cluster), dtype=np.int64)
    for number, members in enumerate(cluster.servers):
        servers[list(members)] = number
    found = [servers] if _is_even(np.arange(len(cluster)), servers) else []
    last = found[-1] if found else np.arange(len(cluster))
    if not found and len(cluster.servers) < len(cluster):
        return []
    for bandwidth in cluster.pairs.bandwidths()[::-1]:
        labels = cluster.pairs.components(float(bandwidth))
        if _is_even(last, labels):
            found.append(labels)
            last = labels
    return found


def _is_even(inner: Ints, outer: Ints) -> bool:
    """Whether components are several, each of equally many (and more than one) inner ones."""
    pairs = np.unique(np.stack([outer, inner]), axis=1)
    inside = np.unique(pairs[0], return_counts=True)[1]
    whole = len(np.unique(inner)) == pairs.shape[1]
    return whole and len(inside) > 1 and inside[0] > 1 and bool((inside == inside[0]).all())


def _slowest(cluster: Cluster, labels: Ints) -> float:
    """The least bandwidth between two devices of one component."""
    groups = [np.flatnonzero(labels == one).tolist() for one in np.unique(labels)]
    return min(cluster.pairs.slowest(group, group)[0] for group in groups)


def optimize(
    costs: LayerCosts,
    hierarchy: Hierarchy,
    *,
    overlapped: bool = True,
    shape: Shape = "any",
) -> tuple[LevelTables, ...]:
    """The tables A^k, from the lowest level.

    Parameters
    ----------
    costs
        A chain of layers.
    hierarchy
        The devices.
    overlapped
        An all-reduce runs beside the computation, as the thesis has it; else after it, and for
        4 (m - 1) / m of the bytes, as in PipeDream's public code.
    shape
        ``straight``: every stage on one device; ``data``: one stage on all devices.
    """
    states = costs.states()
    compute = np.where(states.stages, range_sums(states.work), np.inf)
    weights = range_sums(states.parameter_bytes)
    found: list[LevelTables] = []
    for k, level in enumerate(hierarchy.levels):
        reduced = link_seconds(weights, level.bandwidth)
        moved = link_seconds(2.0 * states.crossing_bytes, level.bandwidth)
        tables = _solve_level(
            compute, states.work, reduced, moved, level.workers, hierarchy.size(k),
            k + 1 == len(hierarchy.levels), 1 if shape == "straight" else level.workers,
            shape != "data", overlapped,
        )  # fmt: skip
        found.append(LevelTables(*tables))
        compute = np.ascontiguousarray(found[-1].slowest[:, :, level.workers])
    return tuple(found)


def placed(tables: tuple[LevelTables, ...], hierarchy: Hierarchy) -> tuple[StageChoice, ...]:
    """The stages of the optimum on their devices.

    A component is named by the place of its first device in the order.
    """
    top = len(hierarchy.levels) - 1
    size = hierarchy.size(top)
    bundles = [[c * size] for c in range(hierarchy.levels[top].workers)]
    whole = tables[top].slowest.shape[1] - 1
    return tuple(_placed(tables, hierarchy, top, bundles, (0, whole)))


def _placed(
    tables: tuple[LevelTables, ...],
    hierarchy: Hierarchy,
    k: int,
    bundles: list[list[int]],
    layers: tuple[int, int],
) -> Iterator[StageChoice]:
    """The stages of some layers on bundles of components of level k, which compute the same."""
    used = 0
    for start, stop, workers in tables[k].stages(*layers, len(bundles)):
        taken = [c for bundle in bundles[used : used + workers] for c in bundle]
        used += workers
        if k == 0:
            yield StageChoice(start, stop, tuple(hierarchy.order[c] for c in taken))
            continue
        size = hierarchy.size(k - 1)
        inner = [[c + x * size for c in taken] for x in range(hierarchy.levels[k - 1].workers)]
        yield from _placed(tables, hierarchy, k - 1, inner, (start, stop))


@njit(cache=True, error_model="numpy")
def _stage(compute: float, reduced: float, m: int, overlapped: bool) -> float:
    """Seconds per microbatch of a stage on m components, with its gradients over the link."""
    if overlapped:
        return max(compute, 2.0 * (m - 1) * reduced) / m
    return (compute + 4.0 * (m - 1) / m * reduced) / m


@njit(cache=True, error_model="numpy")
def _solve_level(  # noqa: C901 - one recurrence
    compute: Floats,
    prefix: Floats,
    reduced: Floats,
    moved: Floats,
    workers: int,
    size: int,
    highest: bool,
    most: int,
    cuts: bool,
    overlapped: bool,
) -> tuple[Floats, NDArray[np.int32], NDArray[np.int32]]:
    """The tables of one level of components of ``size`` devices.

    T(i, j, m) is :func:`_stage` of A_below(i, j) and w(i, j) / B, and A(i, j, m) is the least of
    T(i, j, m) and, over s and m', max(A(i, s, m - m'), 2 a_s / B, T(s, j, m')); of equal ones that
    of largest s, then of least m'. The printed minimum leaves out the single stage on all m. No
    stage has more than ``most`` components; without ``cuts`` there is one stage.

    No stage is faster than its work on all its devices: with ``prefix`` that limits the s that can
    improve on the best one so far.
    """
    states = len(prefix)
    rows = 1 if highest else states
    slowest = np.full((rows, states, workers + 1), np.inf)
    split = np.zeros((rows, states, workers + 1), dtype=np.int32)
    last = np.zeros((rows, states, workers + 1), dtype=np.int32)
    for i in range(rows):
        for j in range(i + 1, states):
            for m in range(1, workers + 1):
                best, at, with_k = np.inf, i, m
                if m <= most:
                    best = _stage(compute[i, j], reduced[i, j], m, overlapped)
                for k in range(1, min(m, most + 1) if cuts else 1):
                    ahead, own = (m - k) * size, k * size
                    middle = prefix[i] + (prefix[j] - prefix[i]) * (m - k) / m
                    first = min(max(np.searchsorted(prefix, middle), i + 1), j - 1)
                    for turn in range(2):
                        low = high = first
                        if turn:
                            room = best * (1 + ROUNDING)
                            low = np.searchsorted(prefix, prefix[j] - room * own)
                            high = np.searchsorted(prefix, prefix[i] + room * ahead, "right") - 1
                        for s in range(min(high, j - 1), max(low, i + 1) - 1, -1):
                            one = _stage(compute[s, j], reduced[s, j], k, overlapped)
                            time = max(slowest[i, s, m - k], moved[s], one)
                            if time < best or (
                                time == best and at > i and (s > at or (s == at and k < with_k))
                            ):
                                best, at, with_k = time, s, k
                slowest[i, j, m], split[i, j, m], last[i, j, m] = best, at, with_k
    return slowest, split, last
