"""Multi-region joint scheduling (Algorithm 1) with the loop for memory (section 4.1)."""

import math
from dataclasses import dataclass

import numpy as np

from stagewright.formulations.backprop.overlap import Streams
from stagewright.formulations.backprop.problem import Timetable, peaks
from stagewright.formulations.backprop.regions import Regions, regions_of
from stagewright.formulations.backprop.training import single_device
from stagewright.graphs.documents.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class StreamResult:
    """An order of the weight gradients with its timetable by the model of overlap.

    ``bound`` holds for every order of the sub-stream; ``prescheduled`` regions ran their weight
    gradients at once, to save memory.
    """

    order: tuple[int, ...]
    timetable: Timetable
    cost: float
    bound: float
    peak: float
    prescheduled: int


def joint_schedule(regions: Regions, prescheduled: int = 0) -> list[list[int]]:
    """Algorithm 1: the layers whose weight gradients run in each region, in order.

    The pair of region and weight gradient with the highest speed-up comes first, the one that is
    ready first among equal ones. A region closes when its main kernels are covered; what is left
    then runs in the last region before its forward. In the first ``prescheduled`` regions weight
    gradients run as soon as they are ready.
    """
    count, size = regions.sub.shape
    plan: list[list[int]] = [[] for _ in range(size)]
    now, waiting = np.zeros(size), list(range(count))
    for k in sorted(waiting, key=lambda k: (regions.ready[k], regions.offset[k])):
        if regions.ready[k] < prescheduled:
            plan[regions.ready[k]].append(k + 1)
            waiting.remove(k)
    open_ = set(range(prescheduled, size))
    while waiting:
        pairs = [(_key(regions, k, i, now[i]), k, i) for i in open_ for k in waiting]
        best, k, i = min(pairs, default=((math.inf,), 0, 0))
        if math.isinf(best[0]):
            for k in waiting:
                plan[regions.last[k]].append(k + 1)
            break
        plan[i].append(k + 1)
        waiting.remove(k)
        begin = max(now[i], regions.offset[k] if regions.ready[k] == i else 0.0)
        now[i] = begin + regions.sub[k, i]
        if now[i] >= regions.main[i]:
            open_.remove(i)
    return plan


def _key(regions: Regions, k: int, i: int, now: float) -> tuple[float, ...]:
    """Least is best: waiting time first, as only what is runnable counts; then the speed-up."""
    offset = regions.offset[k] if regions.ready[k] == i else 0.0
    if not regions.ready[k] <= i <= regions.last[k] or offset >= regions.main[i]:
        return (math.inf,)
    return (max(0.0, offset - now), -regions.speedup[k, i], regions.ready[k], regions.offset[k])


def schedule_streams(
    streams: Streams, ends: tuple[int, ...], memory: float | None = None
) -> StreamResult:
    """Algorithm 1 on regions that stop before main kernels ``ends``; prescheduled ones as needed.

    Raises
    ------
    InputError
        If it does not fit in ``memory`` bytes even with all regions prescheduled.
    """
    regions = regions_of(streams, ends)
    problem = single_device(streams.layers)
    peak = math.inf
    for prescheduled in range(len(ends) + 1):
        order = tuple(k for one in joint_schedule(regions, prescheduled) for k in one)
        timetable = streams.timetable(order)
        peak = max(peaks(problem, timetable), default=0.0)
        if memory is None or peak <= memory:
            cost, bound = timetable.end, streams.bound()
            return StreamResult(order, timetable, cost, min(bound, cost), peak, prescheduled)
    raise InputError(f"memory must be at least {peak:g} bytes, got {memory:g}")
