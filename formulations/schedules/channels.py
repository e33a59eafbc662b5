"""Start times of an order whose transfers share channels.

Every pair of neighbouring stages on two devices has a channel, half or full duplex, and so has each
pair of copies of them in an order with several paths. A channel serves transfers first come, first
served (SPP Algorithm 1, lines 9-25). A whole backward sends its gradient when it ends.
"""

import heapq
from collections import deque

from stagewright.formulations.plans.actions import SEND_B, SEND_F, Action
from stagewright.formulations.schedules.order import F, Order, W
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
    starts, sent = channel_starts(order, times, full_duplex)
    return TimedOrder(order, times, starts), sent


def channel_starts(
    order: Order, times: ActionTimes, full_duplex: bool = False
) -> tuple[Starts, dict[Need, float]]:
    """The starts of `with_channels`, in the layout of the rows, for any times of the actions."""
    return _Run(order, times, full_duplex).finish()


class _Run:
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
