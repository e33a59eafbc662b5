"""Backfilling: a device that would wait runs a later computation of its row, if memory allows.

An input gradient may also run before a weight gradient that is next: this takes no memory.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.formulations.schedules.order import F, I, Order, Row, W

_CHANGE = {F: 1, I: 0, W: -1}
_NEVER = 1 << 60


def backfilled(rows: Sequence[Row]) -> Order:
    """The order that results when every computation of ``rows`` takes one slot.

    Backwards are split. Every stage keeps the order of its computations of each kind, and no device
    ever keeps more microbatches in flight than the row that keeps the most.
    """
    limit = max(max(accumulate(_CHANGE[one.kind] for one in row)) for row in rows)
    stages = 1 + max(action.stage for row in rows for action in row)
    ends = _Ends(stages, sum(map(len, rows)) // (3 * stages))
    devices = [_Device(row, limit, ends) for row in rows]
    left, now = sum(map(len, rows)), 0
    while left:
        left -= sum([device.step(now) for device in devices])
        now += 1
    return Order(tuple(tuple(device.done) for device in devices))


class _Ends:
    """The end of every forward and input gradient, in the order in which a microbatch meets them.

    Place j S' + k is of microbatch j, where k counts the input, the S forwards and S gradients.
    """

    def __init__(self, stages: int, microbatches: int) -> None:
        self.stages, self.length = stages, 2 * stages + 1
        self.end = [_NEVER] * (self.length * microbatches)
        self.end[:: self.length] = [0] * microbatches

    def needed(self, action: Action) -> int:
        """The place of what the computation needs; a forward or input gradient makes the next."""
        stage, first = action.stage, self.length * (action.microbatch or 0)
        if action.kind is F:
            return first + stage
        return first + 2 * self.stages - stage - (action.kind is I)


class _Device:
    """The remaining computations of a device, in row order and by stage and kind."""

    def __init__(self, row: Row, limit: int, ends: _Ends) -> None:
        self.row, self.limit, self.end = row, limit, ends.end
        self.needed = [ends.needed(one) for one in row]
        self.taken, self.next, self.in_flight = [False] * len(row), 0, 0
        self.done: list[Action] = []
        self.queues: dict[tuple[int, ActionKind], deque[int]] = {}
        for place, one in enumerate(row):
            self.queues.setdefault((one.stage, one.kind), deque()).append(place)

    def step(self, now: int) -> bool:
        """Do a computation in slot ``now``, if any is ready; return whether one was done."""
        while self.next < len(self.row) and self.taken[self.next]:
            self.next += 1
        if self.next == len(self.row):
            return False
        place: int | None = self.next
        if self.row[self.next].kind is W or self.end[self.needed[self.next]] > now:
            place = self._instead(now)
        if place is None:
            return False
        self._do(place, now)
        return True

    def _instead(self, now: int) -> int | None:
        """An input gradient if one is ready, since other devices wait for it; else the next."""
        heads = [queue[0] for queue in self.queues.values() if queue]
        ready = [place for place in heads if self.end[self.needed[place]] <= now]
        ready.sort(key=lambda place: (self.row[place].kind is not I, place))
        return next((place for place in ready if self._fits(place)), None)

    def _fits(self, place: int) -> bool:
        """Whether memory stays within the limit if ``place`` runs before all earlier places."""
        if self.row[place].kind is not F:
            return True
        level = self.in_flight + 1
        for before in range(self.next, place):
            if level > self.limit:
                return False
            if not self.taken[before]:
                level += _CHANGE[self.row[before].kind]
        return level <= self.limit

    def _do(self, place: int, now: int) -> None:
        action = self.row[place]
        self.queues[action.stage, action.kind].popleft()
        self.taken[place] = True
        self.in_flight += _CHANGE[action.kind]
        if action.kind is not W:
            self.end[self.needed[place] + 1] = now + 1
        self.done.append(action)
