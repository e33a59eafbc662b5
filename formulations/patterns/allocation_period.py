"""The least period of an allocation of stages, from its definition (MadPipe 4.2)."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from stagewright.formulations.patterns.allocation_tables import AllocationTables, Placed
from stagewright.graphs.documents.errors import InvalidPlan


def delayed(group: int, rest: int, seconds: int, period: int) -> tuple[int, int]:
    """V (+) y, where V = (group - 1) period + rest (MadPipe 4.2.2).

    An item of y = ``seconds`` (both directions) joins the group if the period has time for it in
    addition to ``rest``; otherwise it starts the next group. This is the least delay at which the
    forward and the backward of one device do not overlap.
    """
    return (group, rest + seconds) if rest + seconds <= period else (group + 1, seconds)


def allocation_period(tables: AllocationTables, placed: Sequence[Placed]) -> int:
    """The least feasible period, found by raising the load bound to the next group change."""
    period = _load(tables, placed)
    while True:
        trips, change = _trips(tables, placed, period)
        wanted = _reduce_period(tables, placed, trips)
        if wanted <= period and _fits(tables, placed, trips):
            return period
        change = change if wanted <= period else min(change, wanted)
        if change == math.inf:
            raise InvalidPlan("the allocation does not fit in memory at any period")
        period = int(change)


def _load(tables: AllocationTables, placed: Sequence[Placed]) -> int:
    """The largest load of a group, of a link, or of an all-reduce per period."""
    loads: Counter[tuple[int, ...]] = Counter()
    for one in placed:
        loads[one.group,] += _seconds(tables, one)
    for one, following in pairwise(placed):
        link = tuple(sorted((one.group, following.group)))
        loads[link] += int(tables.transfer[one.group, following.group, one.stop])
    reduces = [-(-_reduce(tables, one) // (tables.versions - 1)) for one in placed]
    return max(*loads.values(), *reduces)


def _trips(
    tables: AllocationTables, placed: Sequence[Placed], period: int
) -> tuple[list[tuple[int, int]], float]:
    """Group and rest of each stage, V (+) U, and the next period at which a group changes."""
    group, rest, owner = 1, 0, -1
    found, change = [], math.inf
    for one in reversed(placed):
        crossing = int(tables.transfer[one.group, owner, one.stop]) if owner >= 0 else 0
        for seconds in (crossing, _seconds(tables, one)):
            if rest + seconds > period:
                change = min(change, rest + seconds)
            group, rest = delayed(group, rest, seconds, period)
        owner = one.group
        found.append((group, rest))
    return found[::-1], change


def _reduce_period(
    tables: AllocationTables, placed: Sequence[Placed], trips: Sequence[tuple[int, int]]
) -> float:
    """The least period at which every trip and its all-reduce end within m + 1 periods."""
    wanted = 0.0
    for one, (group, rest) in zip(placed, trips, strict=True):
        reduce, left = _reduce(tables, one), tables.versions + 1 - group
        if reduce and left > 0:
            wanted = max(wanted, -(-(rest + reduce) // left))
    return wanted


def _fits(
    tables: AllocationTables, placed: Sequence[Placed], trips: Sequence[tuple[int, int]]
) -> bool:
    """Whether the microbatches in flight fit in memory, with two versions of the weights.

    A stage of group g keeps g microbatches at some instant, at least g - 1 at all times, and at
    least as many as every later stage. So the special group keeps g - 1 microbatches of each of its
    stages, and at some instant one more of a stage and of all earlier stages of the same g.
    MadPipe (4.2.1) counts g - 1 only.
    """
    always = most = before = last = 0
    for one, (group, _) in zip(placed, trips, strict=True):
        sort = tables.sort[one.group]
        stage = (sort, one.choice, one.stop, one.start)
        static = int(tables.static[sort, one.stop, one.start])
        saved, working = int(tables.saved[stage]), int(tables.working[stage])
        if one.group == tables.special:
            before, last = before if group == last else 0, group
            always += static + (group - 1) * saved
            most = max(most, before + saved + working)
            before += saved
        elif static + group * saved + working > tables.memory[one.group]:
            return False
    few = max(group for group, _ in trips) <= tables.versions
    return few and (tables.special < 0 or always + most <= tables.memory[tables.special])


def _seconds(tables: AllocationTables, one: Placed) -> int:
    return int(tables.seconds[tables.sort[one.group], one.choice, one.stop, one.start])


def _reduce(tables: AllocationTables, one: Placed) -> int:
    return int(tables.reduce[one.group, one.stop, one.start])
