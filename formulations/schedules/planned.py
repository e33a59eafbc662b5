"""The stages and start times of a plan that follows an order.

The copies of a stage, one per path, become the devices of a round-robin stage: copy m mod r takes
microbatch m. So a schedule in both directions is a plan whose stages are on two devices each, and
devices on two stages: the plan's all-reduces add up the gradients of the copies.

Start times of an order whose transfers share channels.

Every pair of neighbouring stages on two devices has a channel, half or full duplex, and so has each
pair of copies of them in an order with several paths. A channel serves transfers first come, first
served (SPP Algorithm 1, lines 9-25). A whole backward sends its gradient when it ends.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.formulations.plans.actions import (
    FLUSH,
    REDUCE,
    SEND_B,
    SEND_F,
    UPDATE,
    Action,
    WeightRule,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.shards import stays
from stagewright.formulations.plans.structure import Structure, ending_starts, work_of
from stagewright.formulations.plans.timing import Blocks, durations, empty_blocks
from stagewright.formulations.schedules.order import B, F, I, Order, W
from stagewright.formulations.schedules.timing import ActionTimes, StageTimes, Starts, TimedOrder
from stagewright.graphs.documents.errors import InputError

Need = tuple[bool, int, int]
"""What a forward (True) or backward of a stage needs for a microbatch."""

_Channel = tuple[int, int, int, bool]
"""The first stage of a pair, its device, that of the second, whether it is only the way back."""


def with_channels(
    order: Order, times: StageTimes, full_duplex: bool = False
) -> tuple[TimedOrder, dict[Need, float]]:
    """The order with its earliest start times, and every transfer's start by the tensor it brings.

    A transfer between two stages on one device starts where the computation before it ends.

    Raises
    ------
    InputError
        If the devices deadlock; the message names a computation that waits.
    """
    starts, sent = _channel_starts(order, times, full_duplex)
    return TimedOrder(order, times, starts), sent


def _channel_starts(
    order: Order, times: ActionTimes, full_duplex: bool = False
) -> tuple[Starts, dict[Need, float]]:
    """The starts of `with_channels`, in the layout of the rows, for any times of the actions."""
    return _OrderRun(order, times, full_duplex).finish()


class _OrderRun:
    """Events are ends of computations, by device, and of transfers, by channel."""

    def __init__(self, order: Order, times: ActionTimes, full_duplex: bool) -> None:
        self.order, self.times, self.last = order, times, len(order.paths[0]) - 1
        self.full_duplex = full_duplex
        self.starts: list[list[float]] = [[] for _ in order.rows]
        self.busy = [False] * len(order.rows)
        self.arrived: set[Need] = {(True, 0, m) for m in range(order.microbatches)}
        self.sent: dict[Need, float] = {}
        self.queues: dict[_Channel, deque[Need]] = {}  # the first of a queue is on its way
        self.events: list[tuple[float, int, int | _Channel]] = []
        self.sequence = 0  # among events at one time the first that began

    def finish(self) -> tuple[Starts, dict[Need, float]]:
        for device in range(len(self.order.rows)):
            self._start(device, 0.0)
        while self.events:
            now, _, ended = heapq.heappop(self.events)
            if isinstance(ended, int):
                self._end(ended, now)
            else:
                need = self.queues[ended].popleft()
                self._send(ended, now)
                self._arrive(need, now)
        for row, starts in zip(self.order.rows, self.starts, strict=True):
            if len(starts) < len(row):
                raise InputError(
                    f"deadlock: the devices wait for each other, one of them at {row[len(starts)]}"
                )
        return tuple(map(tuple, self.starts)), self.sent

    def _start(self, device: int, now: float) -> None:
        """Begin the device's next computation, if the device is free and the input has arrived."""
        row, starts = self.order.rows[device], self.starts[device]
        if self.busy[device] or len(starts) == len(row):
            return
        action = row[len(starts)]
        if action.kind is W or _need(action) in self.arrived:
            self.busy[device] = True
            starts.append(now)
            self._push(now + self.times.of(action), device)

    def _end(self, device: int, now: float) -> None:
        action = self.order.rows[device][len(self.starts[device]) - 1]
        self.busy[device] = False
        if action.kind is not W:
            self._deliver(action, now)
        self._start(device, now)

    def _deliver(self, action: Action, now: float) -> None:
        """Hand the output of a forward or backward to the stage that needs the output."""
        forward, stage, m = _need(action)
        if forward and stage == self.last:
            self._arrive((False, stage, m), now)
            return
        following = stage + 1 if forward else stage - 1
        if following < 0:
            return
        path, need = self.order.paths[self.order.path_of[m]], (forward, following, m)
        if path[stage] == path[following]:
            self.sent[need] = now
            self._arrive(need, now)
            return
        first, second = sorted((stage, following))
        back = self.full_duplex and not forward
        channel = (first, path[first], path[second], back)
        queue = self.queues.setdefault(channel, deque())
        queue.append(need)
        if len(queue) == 1:
            self._send(channel, now)

    def _send(self, channel: _Channel, now: float) -> None:
        """Begin the channel's next transfer, if there is one."""
        if self.queues[channel]:
            need = self.queues[channel][0]
            self.sent[need] = now
            forward, stage, m = need
            send = Action(stage - 1, SEND_F, m) if forward else Action(stage + 1, SEND_B, m)
            self._push(now + self.times.of(send), channel)

    def _arrive(self, need: Need, now: float) -> None:
        self.arrived.add(need)
        self._start(self.order.paths[self.order.path_of[need[2]]][need[1]], now)

    def _push(self, time: float, ended: int | _Channel) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (time, self.sequence, ended))


def _need(action: Action) -> Need:
    return action.kind is F, action.stage, action.microbatch or 0


def copies_of(order: Order) -> tuple[tuple[int, ...], ...]:
    """The devices of each stage: device m mod their number takes microbatch m.

    Raises
    ------
    InputError
        If the copies of a stage take microbatches in another way.
    """
    found = []
    for s in range(len(order.paths[0])):
        taken = [order.paths[path][s] for path in order.path_of]
        copies = tuple(dict.fromkeys(taken))
        for m, device in enumerate(taken):
            if device != copies[m % len(copies)]:
                raise InputError(
                    f"stage {s}: microbatch {m} is on device {device}; the copies of a stage in a "
                    f"plan take microbatches in turn, so that it is on {copies[m % len(copies)]}"
                )
        found.append(copies)
    return tuple(found)


def stages_of(order: Order, cuts: Sequence[int], names: Sequence[str]) -> tuple[Stage, ...]:
    """Stage s with layers [cuts[s], cuts[s + 1]); ``names`` are those of the order's devices."""
    return tuple(
        Stage(
            (cuts[s], cuts[s + 1]),
            tuple(names[d] for d in copies),
            "round-robin" if len(copies) > 1 else "split",
        )
        for s, copies in enumerate(copies_of(order))
    )


def starts_in_order(
    problem: PipelineProblem, stages: Sequence[Stage], order: Order, rule: WeightRule = FLUSH
) -> Blocks:
    """The earliest starts of computations and transfers, without all-reduces and updates.

    Raises InputError if the devices deadlock.
    """
    split = np.zeros((len(stages), order.microbatches), dtype=bool)
    for row in order.rows:
        for action in row:
            split[action.stage, action.microbatch] |= action.kind is I
    times = _Lasting(durations(problem, stages, split, rule))
    begun, sent = _channel_starts(order, times)
    starts = empty_blocks(len(stages), order.microbatches)
    for row, seconds in zip(order.rows, begun, strict=True):
        for action, start in zip(row, seconds, strict=True):
            starts[action.kind][action.stage, action.microbatch] = start
    for (forward, stage, m), start in sent.items():
        s = stage - 1 if forward else stage + 1
        if not stays(stages[s], stages[stage], m):
            starts[SEND_F if forward else SEND_B][s, m] = start
    return starts


def starts_to_the_end(
    problem: PipelineProblem, stages: Sequence[Stage], order: Order, rule: WeightRule = FLUSH
) -> Blocks:
    """The starts of `starts_in_order` with those of all-reduces and updates after the backwards.

    Raises InputError if the devices deadlock.
    """
    starts = starts_in_order(problem, stages, order, rule)
    if not rule.updates_every_round:
        starts |= _endings(problem, stages, starts)
    return starts


def stage_times(problem: PipelineProblem, stages: Sequence[Stage]) -> StageTimes:
    """The times of the stages' parts for microbatch 0."""
    split = np.ones((len(stages), problem.microbatches), dtype=bool)
    lasting = durations(problem, stages, split)
    first = {kind: np.nan_to_num(seconds[:, 0]).tolist() for kind, seconds in lasting.items()}
    return StageTimes(
        forward=tuple(first[F]),
        input_gradient=tuple(first[I]),
        weight_gradient=tuple(first[W]),
        send_forward=tuple(first[SEND_F][:-1]),
        send_backward=tuple(first[SEND_B][1:]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Lasting:
    """The cost model's seconds as the times of actions."""

    seconds: Blocks

    def of(self, action: Action) -> float:
        """The seconds of a computation or a transfer."""
        return float(self.seconds[action.kind][action.stage, action.microbatch or 0])


def _endings(problem: PipelineProblem, stages: Sequence[Stage], starts: Blocks) -> Blocks:
    """All-reduces and optimizer steps; a whole backward is its two parts in sequence here."""
    split = tuple(bool(row.any()) for row in ~np.isnan(starts[I]))
    work, endings, _ = work_of(problem, Structure(tuple(stages), split))
    rows = np.full_like(work.seconds, np.nan)
    rows[:2] = starts[F], np.fmin(starts[B], starts[I])
    rows[2] = np.where(np.isnan(starts[W]), rows[1] + work.seconds[1], starts[W])
    reduces, updates, _ = ending_starts(work, endings, rows)
    return {REDUCE: reduces[:, None], UPDATE: updates[:, None]}
