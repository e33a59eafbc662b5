"""V-Half and V-Min: V schedules with less memory (Qi et al. 2024, "Controllable Memory").

A *building block* gives the slots of the forwards and input gradients of one microbatch. It is
repeated every six slots, the six computations of a device per microbatch. Then devices close gaps:
where the next computation is not ready, a later one runs first if the peak of memory stays (the
paper's squeezing and reordering).

Backfilling: a device that would wait runs a later computation of its row, if memory allows.

An input gradient may also run before a weight gradient that is next: this takes no memory.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
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


Block = tuple[int, int, int, int]
"""The slots of F and I: first stage's F, second stage's F, second stage's I, first stage's I."""

_PERIOD = 6


@lru_cache(maxsize=8)
def v_half(devices: int, microbatches: int) -> Order:
    """V-Half: p + O(1) microbatches of a stage, half of 1F1B's activations (section 3.2).

    Device d has the stages d and 2 p - 1 - d, each half a device's layers. Forwards go down every
    second slot. With tF = tI = tW the bubble is half of 1F1B's, 3 (p - 1) such times, if m >= 2 p.
    """
    wait = 0 if devices % 2 else 3  # no two computations in one slot

    def block(d: int) -> Block:
        end = 3 * devices + wait
        return 2 * d, 3 * devices - d - 2, end + 2 * d - 1, end + 3 * devices - d - 2

    return _repeated(devices, microbatches, block)


@lru_cache(maxsize=8)
def v_min(devices: int, microbatches: int) -> Order:
    """V-Min: 2 p / 3 + O(1) microbatches of a stage, a third of 1F1B's activations (section 3.2).

    With tF = tI = tW the bubble is about two thirds of 1F1B's, 4 (p - 1) such times. With
    other times gaps between devices grow with every microbatch.
    """
    wait = 0 if devices % 3 else 2

    def block(d: int) -> Block:
        end = 2 * devices + wait
        return d, 2 * devices - 1 - d, end + d, end + 2 * devices - d - 1

    return _repeated(devices, microbatches, block)


def _repeated(devices: int, microbatches: int, block: Callable[[int], Block]) -> Order:
    rows = []
    for d in range(devices):
        stages = (d, 2 * devices - 1 - d)
        rows.append(_with_weights(stages, block(d), microbatches))
    return backfilled(rows)


def _with_weights(stages: tuple[int, int], block: Block, microbatches: int) -> Row:
    """The block repeated; weight gradients, the oldest first, take the slots that are left."""
    kinds = ((stages[0], F), (stages[1], F), (stages[1], I), (stages[0], I))
    at = sorted(
        (slot + _PERIOD * m, Action(stage, kind, m))
        for slot, (stage, kind) in zip(block, kinds, strict=True)
        for m in range(microbatches)
    )
    row: list[Action] = []
    pending: deque[Action] = deque()
    now = at[0][0]
    for slot, action in at:
        for _ in range(min(slot - now, len(pending))):
            row.append(pending.popleft())
        row.append(action)
        if action.kind is I:
            pending.append(Action(action.stage, W, action.microbatch))
        now = slot + 1
    return (*row, *pending)
