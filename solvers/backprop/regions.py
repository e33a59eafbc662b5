"""Multi-region joint scheduling (Algorithm 1) (section 4.1)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.formulations.backprop.orders import reverse_first_k
from stagewright.formulations.backprop.problem import BackpropProblem, WindowTimes
from stagewright.formulations.backprop.regions import Regions, Streams, regions_of
from stagewright.graphs.documents.arrays import Bools, Ints
from stagewright.solvers.backprop.list_scheduling import list_schedule


@dataclass(frozen=True, slots=True, eq=False)
class ReversedLayers:
    """The best ``k`` that was tried, its timetable, and how many values were tried."""

    k: int
    timetable: WindowTimes
    tried: int


Order = Callable[[BackpropProblem, int], Ints]


def reverse_search(
    problem: BackpropProblem, most: int, order: Order = reverse_first_k
) -> ReversedLayers:
    """Section 5.1's search for k from 0 to ``most``: a grid, halved around its best value.

    It assumes that throughput is about concave in k. With the order
    ``fast_forward`` it finds k of section 6, which the paper leaves open: of data and pipeline
    parallelism together, the first k layers are reversed and the others fast-forwarded.
    """
    found: dict[int, WindowTimes] = {}

    def time(k: int) -> float:
        if k not in found:
            found[k] = list_schedule(problem, order(problem, k))
        return found[k].end

    step = max(1, most // 10)
    best = min((*range(0, most, step), most), key=time)
    while step > 1:
        low, high = max(0, best - step), min(most, best + step)
        step = (step + 1) // 2
        best = min((best, *range(low, high + 1, step)), key=time)
    return ReversedLayers(best, found[best], len(found))


@dataclass(frozen=True, slots=True, eq=False)
class StreamResult:
    """An order of the weight gradients with its timetable by the model of overlap.

    ``bound`` holds for every order of the sub-stream.
    """

    order: tuple[int, ...]
    timetable: WindowTimes
    cost: float
    bound: float


def joint_schedule(regions: Regions, prescheduled: int = 0) -> list[list[int]]:
    """Algorithm 1: the layers whose weight gradients run in each region, in order.

    The pair of region and weight gradient with the highest speed-up comes first, the one that is
    ready first among equal ones. A region closes when its main kernels are covered; what is left
    then runs in the last region before its forward. In the first ``prescheduled`` regions weight
    gradients run as soon as they are ready.
    """
    count, size = regions.sub.shape
    plan: list[list[int]] = [[] for _ in range(size)]
    now, is_left = np.zeros(size), np.full(count, True)
    by_ready = np.lexsort((regions.offset, regions.ready))  # breaks ties
    for k in by_ready[regions.ready[by_ready] < prescheduled].tolist():
        plan[regions.ready[k]].append(k + 1)
        is_left[k] = False
    best = [_best(regions, by_ready, is_left, i, 0.0) for i in range(size)]
    open_ = set(range(prescheduled, size))
    while True:
        i = min(open_, key=lambda i: (best[i].wait, -best[i].speedup, i), default=-1)
        if i < 0 or math.isinf(best[i].wait):
            break
        k = best[i].kernel
        plan[i].append(k + 1)
        is_left[k] = False
        now[i] += best[i].wait + regions.sub[k, i]
        if now[i] >= regions.main[i]:
            open_.remove(i)
        for j in open_:
            if j == i or best[j].kernel == k:
                best[j] = _best(regions, by_ready, is_left, j, now[j])
    for k in by_ready[is_left[by_ready]].tolist():
        plan[regions.last[k]].append(k + 1)
    return plan


class _RegionChoice(NamedTuple):
    """The weight gradient that a region runs next, and how long the region waits for it."""

    wait: float
    speedup: float
    kernel: int


def _best(regions: Regions, by_ready: Ints, is_left: Bools, i: int, now: float) -> _RegionChoice:
    """The weight gradient that region i runs next: the first ready, then the best speed-up."""
    offset = np.where(regions.ready == i, regions.offset, 0.0)
    may = is_left & (regions.ready <= i) & (regions.last >= i) & (offset < regions.main[i])
    own = by_ready[may[by_ready]]
    if len(own) == 0:
        return _RegionChoice(math.inf, 0.0, -1)
    waits = np.maximum(0.0, offset[own] - now)
    wait = waits.min()
    soon = own[waits == wait]
    k = int(soon[np.argmax(regions.speedup[soon, i])])
    return _RegionChoice(float(wait), float(regions.speedup[k, i]), k)


def schedule_streams(streams: Streams, ends: tuple[int, ...]) -> StreamResult:
    """Algorithm 1 on regions that stop before main kernels ``ends``.

    The paper preschedules as few regions as fit in memory; here the fastest number, by the model of
    overlap, for a plan whose memory is checked.

    Raises InputError if it does not fit in ``memory`` bytes for any number of prescheduled regions.
    """
    regions, found = regions_of(streams, ends), list[StreamResult]()
    for prescheduled in range(len(ends) + 1):
        order = tuple(k for one in joint_schedule(regions, prescheduled) for k in one)
        timetable = streams.timetable(order)
        bound = min(streams.bound(), timetable.end)
        found.append(StreamResult(order, timetable, timetable.end, bound))
    return min(found, key=lambda one: one.cost)
