"""Windows: relaxations of the makespan problem to a few consecutive stages, for a target T.

Question: is there a schedule of the whole pipeline with a makespan of at most T? A window keeps the
devices and channels of stages a, ..., b - 1 and answers a weaker question; if its answer is no, T
is a lower bound. Per block j and microbatch m it has a *head*, the least start, and a *tail*, the
least time between the end and T. A schedule of the window keeps

* the order of blocks in a microbatch, and of microbatches in a block (see :mod:`makespan`);
* one block at a time on each kept device and channel;
* the in-flight limits of its stages;
* start >= head and end + tail <= T.

What lies between the forward and the backward of stage b - 1, if any, becomes one block, the
*detour*. It takes the sum D of the durations of its blocks, and its starts are at least d apart,
the longest of these durations. Every schedule of makespan T yields one of the window: let x be
the longest block of the detour, and start the detour as long before x as the detour's blocks
before x take. It then starts after the block before it and ends before the block after it, and two
starts are as far apart as those of x. What lies before stage a is dropped: it acts through heads
and tails only.

The heads and tails are longest paths at first. A search of any window that finds the earliest end
of each block over all schedules raises the heads for all other windows, and a search in reversed
time the tails, since the schedules of makespan T of the pipeline are among those of every window.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from stagewright.formulations.pipelines.blocks import NONE, BlockGraph
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.actions import Action, along_way
from stagewright.formulations.schedules.order import B, F, I, Order, W
from stagewright.formulations.schedules.planned import with_channels
from stagewright.formulations.schedules.timing import StageTimes, TimedOrder
from stagewright.graphs.documents.arrays import Bools, Floats, Ints


def _timed_rows(
    problem: MakespanProblem, times: Timetable
) -> tuple[tuple[tuple[float, Action], ...], ...]:
    """Per device the (start, computation) pairs in their order.

    Of computations that start together all but the last take no time; they are in the order of
    their ends, and at one instant microbatch after microbatch, which keeps every limit in flight.
    """
    rows: list[list[tuple[float, float, Action]]] = [[] for _ in range(1 + max(problem.device))]
    kinds = [
        (F, times.forward, problem.forward),
        (I if problem.is_split else B, times.backward, problem.backward),
    ]
    if times.weight_gradient is not None and problem.weight_gradient is not None:
        kinds.append((W, times.weight_gradient, problem.weight_gradient))
    for kind, starts, seconds in kinds:
        for s, row in enumerate(starts.tolist()):
            rows[problem.device[s]] += [
                (start, start + seconds[s], Action(s, kind, m)) for m, start in enumerate(row)
            ]
    return tuple(
        tuple((start, action) for start, _, action in sorted(row, key=_place)) for row in rows
    )


def order_of_times(problem: MakespanProblem, times: Timetable) -> Order:
    """The order of the computations, without their times."""
    return Order(tuple(tuple(one for _, one in row) for row in _timed_rows(problem, times)))


def stage_times(problem: MakespanProblem) -> StageTimes:
    """The times of the problem's stages; a whole backward is an input gradient alone."""
    return StageTimes(
        forward=problem.forward,
        input_gradient=problem.backward,
        weight_gradient=problem.weight_gradient or (0.0,) * problem.stages,
        send_forward=problem.send_forward,
        send_backward=problem.send_backward,
    )


def timed_order(problem: MakespanProblem, times: Timetable) -> TimedOrder:
    """The order of a timetable with its start times."""
    starts = tuple(tuple(start for start, _ in row) for row in _timed_rows(problem, times))
    return TimedOrder(order_of_times(problem, times), stage_times(problem), starts)


def timetable_of_order(problem: MakespanProblem, order: Order) -> tuple[TimedOrder, Timetable]:
    """Earliest start times of an order of the problem's stages, as an order and as a timetable.

    If the problem's backwards are split, a whole one in the order is an input gradient and a weight
    gradient in sequence whose gradient is sent only after both.

    Raises InputError if the devices deadlock.
    """
    timed, sent = with_channels(order, stage_times(problem), problem.duplex == "full")
    shape = (problem.stages, problem.microbatches)
    starts = {kind: np.zeros(shape) for kind in (F, I, W)}
    for row, begun in zip(order.rows, timed.starts, strict=True):
        for action, start in zip(row, begun, strict=True):
            place = action.stage, action.microbatch or 0
            starts[I if action.kind is B else action.kind][place] = start
            if action.kind is B:
                starts[W][place] = start + problem.backward[action.stage]
    sends = np.zeros((2, problem.stages - 1, problem.microbatches))
    for (forward, stage, m), start in sent.items():
        sends[0 if forward else 1, stage - forward, m] = start
    last = starts[W] if problem.is_split else starts[I]
    return timed, Timetable(
        forward=starts[F],
        backward=starts[I],
        send_forward=sends[0],
        send_backward=sends[1],
        reduce=(last + np.array(problem.last_computation)[:, None]).max(axis=1),
        weight_gradient=starts[W] if problem.is_split else None,
    )


def _place(entry: tuple[float, float, Action]) -> tuple[float, float, int, int, int]:
    start, finish, action = entry
    phase, stage = along_way(action)
    return start, finish, action.microbatch or 0, phase, stage


WINDOWS = "search in windows of stages"


class Span(NamedTuple):
    """The stages ``first`` to ``last`` - 1 of a pipeline, as a range of blocks.

    The window has blocks ``low`` to ``high`` - 1 and their counterparts on the way back.
    """

    first: int
    last: int

    @property
    def low(self) -> int:
        """The forward of the first stage."""
        return 2 * self.first

    @property
    def high(self) -> int:
        """The block after the forward of the last stage."""
        return 2 * self.last - 1


class Window(NamedTuple):
    """n blocks that a microbatch passes in this order, as arrays for the search.

    Attributes
    ----------
    durations, occupied
        Duration of a block, and the time for which it keeps its machine; shape (n,).
    machines
        The machine of each block, numbered from 0; the detour has its own.
    freeing, limits
        As in :class:`BlockGraph`; ``NONE`` where there is no limit.
    opposite, drains
        Once the last microbatch of block ``opposite[j]`` has started, the machine of block j is
        idle for at least ``drains[j]`` before j's last; ``NONE`` and 0 where this is not known.
    is_late
        Whether a block can be the last one on its machine.
    members
        The blocks of each machine; rows are filled up with ``NONE``.
    heads, tails
        Shape (n, M).
    rows
        The block of the pipeline; ``NONE`` for the detour.
    """

    durations: Floats
    occupied: Floats
    machines: Ints
    freeing: Ints
    limits: Ints
    opposite: Ints
    drains: Floats
    is_late: Bools
    members: Ints
    heads: Floats
    tails: Floats
    rows: Ints


def spans(stages: int) -> Iterator[Span]:
    """All windows, short ones first, and late ones first among those of a length."""
    for length in range(1, stages + 1):
        for first in range(stages - length, -1, -1):
            yield Span(first, first + length)


def window(blocks: BlockGraph, span: Span, heads: Floats, tails: Floats) -> Window:
    """The window of ``span``, for whole backwards; heads and tails of all blocks, (blocks, M)."""
    n, work = len(blocks.durations), blocks.durations
    detour = range(span.high, n - span.high)
    after = np.arange(n - span.high, n - span.low)
    kept = [*range(span.low, span.high), *([NONE] if detour else []), *after.tolist()]
    rows = np.array(kept)
    own = {"durations": work[rows], "occupied": work[rows],
           "heads": heads[rows], "tails": tails[rows]}  # fmt: skip
    machines = blocks.machines[rows]
    if detour:
        middle = span.high - span.low
        own["durations"][middle] = work[detour].sum()
        own["occupied"][middle] = work[detour].max()
        own["heads"][middle], own["tails"][middle] = heads[detour[0]], tails[detour[-1]]
        machines[middle] = NONE
    machines = np.unique(machines, return_inverse=True)[1]
    freeing, limits = _limits(blocks, rows)
    opposite, drains = _drains(own["durations"], machines, freeing, limits)
    return Window(
        durations=own["durations"],
        occupied=own["occupied"],
        machines=machines,
        freeing=freeing,
        limits=limits,
        opposite=opposite,
        drains=drains,
        is_late=np.arange(len(rows)) >= len(rows) // 2,
        members=_members(machines),
        heads=own["heads"],
        tails=own["tails"],
        rows=rows,
    )


def _limits(blocks: BlockGraph, rows: Ints) -> tuple[Ints, Ints]:
    place = {row: i for i, row in enumerate(rows.tolist()) if row != NONE}
    freeing, limits = np.full(len(rows), NONE), np.full(len(rows), NONE)
    for row, i in place.items():
        if blocks.freeing[row] != NONE:
            freeing[i], limits[i] = place[int(blocks.freeing[row])], blocks.limits[row]
    return freeing, limits


def _members(machines: Ints) -> Ints:
    own = [np.flatnonzero(machines == i) for i in range(machines.max() + 1)]
    members = np.full((len(own), max(map(len, own))), NONE)
    for i, row in enumerate(own):
        members[i, : len(row)] = row
    return members


def _drains(durations: Floats, machines: Ints, freeing: Ints, limits: Ints) -> tuple[Ints, Floats]:
    """Idle times as in :func:`warm_up_and_drain`, for the devices with one stage."""
    opposite, drains = np.full(len(machines), NONE), np.zeros(len(machines))
    for i in np.flatnonzero(freeing != NONE).tolist():
        j = freeing[i]
        if (machines == machines[i]).sum() == 2:
            between = durations[i + 1 : j].sum()
            opposite[j], drains[j] = i, max(0.0, between - (limits[i] - 1) * durations[j])
    return opposite, drains
