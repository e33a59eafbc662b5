"""ZB1P and ZB2P: zero-bubble schedules for any times and memory (Qi et al. 2024, section 3.1).

The heuristic of the paper. Before the first backward every stage does as many forwards as memory
allows and time leaves. Then rounds of one forward and one input gradient per stage follow; weight
gradients fill the gaps, and run where memory is short. Where the paper leaves a choice all
combinations are tried.

An order in the making, to which computations are appended with their times, is what the zero-bubble
heuristics share.
"""

from collections import deque
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import product
from typing import Literal

from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.formulations.schedules.order import Device, F, I, Order, W, line
from stagewright.formulations.schedules.timing import (
    ActivationMemory,
    StageTimes,
    activations,
    equal_times,
)
from stagewright.graphs.documents.errors import InputError


def require_even(schedule: str, name: str, count: int) -> None:
    """Refuse an odd ``count``. Raises InputError with the nearest counts that work."""
    if count % 2:
        near = f"{count - 1} or {count + 1}" if count > 1 else "2"
        raise InputError(
            f"{schedule} needs an even number of {name}, got {count}; the nearest are {near}"
        )


def require_at_least(schedule: str, name: str, count: int, least: int) -> None:
    """Refuse a ``count`` below ``least``. Raises InputError with the least count that works."""
    if count < least:
        raise InputError(f"{schedule} needs at least {least} {name}, got {count}")


def require_stages(times: StageTimes, stages: int) -> None:
    """Refuse times of another number of stages. Raises InputError with both numbers."""
    if len(times.forward) != stages:
        raise InputError(f"the times are of {len(times.forward)} stages, not of {stages}")


class Construction:
    """The rows so far, with the time, idle time and memory of each device.

    Before the kinds of ``fills`` a weight gradient is also put into a gap that is shorter and does
    not make the longest idle time of all devices longer. ``slack`` is idle time that is no loss for
    a device, since others have more.
    """

    def __init__(
        self,
        device: Device,
        times: StageTimes,
        microbatches: int,
        memory: ActivationMemory,
        fills: Collection[ActionKind],
        slack: Sequence[float] = (),
    ) -> None:
        stages, devices = len(device), 1 + max(device)
        self.device, self.times, self.memory = device, times, memory
        self.count, self.fills, self.last = microbatches, fills, stages - 1
        self.names = {kind: [(s, kind) for s in range(stages)] for kind in (F, I, W)}
        self.rows: list[list[tuple[int, ActionKind]]] = [[] for _ in range(devices)]
        self.clock, self.idle, self.used = [0.0] * devices, [0.0] * devices, [0.0] * devices
        self.first, self.most_idle = [0.0] * devices, 0.0
        self.slack = slack or [0.0] * devices
        self.pending: list[deque[int]] = [deque() for _ in range(devices)]  # stages of gradients
        self.forwards, self.inputs, self.weights = [0] * stages, [0] * stages, [0] * stages
        # When the inputs of a stage's forwards and the gradients of its outputs arrive.
        self.there: list[list[float]] = [[] for _ in device]
        self.back: list[list[float]] = [[] for _ in device]
        self.there[0] = [0.0] * microbatches
        there = zip(device, device[1:], times.send_forward, strict=False)
        back = zip(device, device[1:], times.send_backward, strict=False)
        self.send_forward = [seconds if a != b else 0.0 for a, b, seconds in there]
        self.send_backward = [seconds if a != b else 0.0 for a, b, seconds in back]

    def span(self) -> float:
        """The longest time from the first start to the last end of a device."""
        return max(end - start for start, end in zip(self.first, self.clock, strict=True))

    def makespan(self) -> float:
        """The end of the last computation."""
        return max(self.clock)

    def order(self) -> Order:
        """The order of the rows; every stage takes microbatches by number, for each kind."""
        rows = []
        for row in self.rows:
            numbers = {one: iter(range(self.count)) for one in set(row)}
            rows.append(tuple(Action(*one, next(numbers[one])) for one in row))
        return Order(tuple(rows))

    def makes_room(self, s: int) -> bool:
        """Run weight gradients until a forward of the stage fits; return whether it fits."""
        d = self.device[s]
        while self.used[d] + self.memory.saved[s] > self.memory.limit[d]:
            if not self.pending[d]:
                return False
            self.weight_gradient(d)
        return True

    def forward(self, s: int) -> None:
        """Run the stage's next forward, after computations that fill the time before its input."""
        d, m = self.device[s], self.forwards[s]
        arrival = self.there[s][m]
        self._fill_gap(d, arrival, F)
        if not self.rows[d]:
            self.first[d] = self.clock[d] = arrival
        self._append(d, s, F, arrival, self.times.forward[s])
        self.used[d] += self.memory.saved[s]
        self.forwards[s] = m + 1
        if s < self.last:
            self.there[s + 1].append(self.clock[d] + self.send_forward[s])
        else:
            self.back[s].append(self.clock[d])

    def input_gradient(self, s: int) -> None:
        """Run the stage's next input gradient, after computations that fill the time until then."""
        d = self.device[s]
        arrival = self.back[s][self.inputs[s]]
        self._fill_gap(d, arrival, I)
        self._append(d, s, I, arrival, self.times.input_gradient[s])
        self.used[d] += self.memory.kept[s] - self.memory.saved[s]
        self.pending[d].append(s)
        self.inputs[s] += 1
        if s > 0:
            self.back[s - 1].append(self.clock[d] + self.send_backward[s - 1])

    def weight_gradient(self, d: int) -> None:
        """The oldest weight gradient that the device has put off."""
        s = self.pending[d].popleft()
        self._append(d, s, W, 0.0, self.times.weight_gradient[s])
        self.used[d] -= self.memory.kept[s]
        self.weights[s] += 1

    def finish(self) -> None:
        """Run all remaining weight gradients."""
        for d, pending in enumerate(self.pending):
            while pending:
                self.weight_gradient(d)

    def _fill_gap(self, d: int, arrival: float, kind: ActionKind) -> None:
        """Weight gradients while the device waits for a computation of ``kind``."""
        while self.pending[d] and self.clock[d] < arrival:
            gap = arrival - self.clock[d]
            fits = gap >= self.times.weight_gradient[self.pending[d][0]]
            most = max(self.most_idle, self.slack[d])
            if not (fits or kind in self.fills or gap > most - self.idle[d]):
                break
            self.weight_gradient(d)

    def _append(self, d: int, s: int, kind: ActionKind, ready: float, seconds: float) -> None:
        start = self.clock[d]
        if ready > start:
            self.idle[d] += ready - start
            self.most_idle = max(self.most_idle, self.idle[d])
            start = ready
        self.clock[d] = start + seconds
        self.rows[d].append(self.names[kind][s])


Goal = Literal["makespan", "span"]


@lru_cache(maxsize=8)
def zb1p(
    devices: int,
    microbatches: int,
    times: StageTimes | None = None,
    memory: ActivationMemory | None = None,
    goal: Goal = "makespan",
) -> Order:
    """The heuristic with at most p microbatches in flight per stage: 1F1B's memory.

    A limit in ``memory`` that allows less counts too.
    """
    return _within(devices, devices, microbatches, times, memory, goal)


@lru_cache(maxsize=8)
def zb2p(
    devices: int,
    microbatches: int,
    times: StageTimes | None = None,
    memory: ActivationMemory | None = None,
    goal: Goal = "makespan",
) -> Order:
    """The heuristic with at most 2 p microbatches in flight per stage: twice 1F1B's memory.

    A limit in ``memory`` that allows less counts too.
    """
    return _within(2 * devices, devices, microbatches, times, memory, goal)


def _within(
    most: int,
    devices: int,
    microbatches: int,
    times: StageTimes | None,
    memory: ActivationMemory | None,
    goal: Goal,
) -> Order:
    times = times or equal_times(devices)
    require_stages(times, devices)
    device = line(devices)
    memory = (memory or activations(device, most)).within(most, device)
    return automatic(times, microbatches, memory, goal)


def automatic(
    times: StageTimes, microbatches: int, memory: ActivationMemory, goal: Goal = "makespan"
) -> Order:
    """The best order of the heuristic, with stage s on device s.

    The goal ``span`` is the paper's: the longest time from a device's first start to its last end.

    Raises
    ------
    InputError
        If a device has no room for one microbatch.
    """
    memory.require_room(line(len(times.forward)))
    tried = (
        _LineRounds(times, microbatches, memory, *choices).built()
        for choices in product((True, False), repeat=3)
    )
    span_first = goal == "span"
    best = min(tried, key=lambda one: (span_first and one.span(), one.makespan()))
    return best.order()


class _LineRounds(Construction):
    """The rounds of a line of stages.

    ``late`` admits a forward that delays the first backward. ``skips`` leaves a forward for a later
    round if the next gradient would wait for it.
    """

    def __init__(
        self,
        times: StageTimes,
        microbatches: int,
        memory: ActivationMemory,
        late: bool,
        skips: bool,
        fills: bool,
    ) -> None:
        kinds = (F, I) if fills else ()
        super().__init__(line(len(times.forward)), times, microbatches, memory, kinds)
        self.late, self.skips = late, skips

    def built(self) -> "_LineRounds":
        """Schedule everything."""
        self._warm_up()
        for _ in range(1, self.count):
            for s in self._forward_stages():
                if (s == 0 or self.forwards[s] < self.forwards[s - 1]) and self.makes_room(s):
                    self.forward(s)
            for s in reversed(self.device):
                self.input_gradient(s)
        self.finish()
        return self

    def _warm_up(self) -> None:
        """Forwards until memory is full or the first gradient arrives, then its backward."""
        for s in self.device:
            self.forward(s)
        extra = [0] * len(self.device)
        gradient = self.clock[-1] + self.times.input_gradient[-1]
        for s in reversed(self.device[:-1]):
            gradient += self.times.send_backward[s]
            extra[s], end = self._before(s, gradient)
            gradient = max(end, gradient) + self.times.input_gradient[s]
        for s in self.device:
            if s > 0:  # one forward less than the stage before, as long as that has some left
                ahead = extra[s - 1] + 1 < self.count
                extra[s] = min(extra[s], max(0, extra[s - 1] - ahead))
            for _ in range(extra[s]):
                self.forward(s)
        for s in reversed(self.device):
            self.input_gradient(s)

    def _before(self, s: int, gradient: float) -> tuple[int, float]:
        """How many more forwards a stage does before its first gradient arrives, and their end."""
        seconds, saved = self.times.forward[s], self.memory.saved[s]
        extra, end, used = 0, self.clock[s], self.used[s]
        while (
            extra + 1 < self.count
            and used + saved <= self.memory.limit[s]
            and (end < gradient if self.late else end + seconds <= gradient)
        ):
            extra, end, used = extra + 1, end + seconds, used + saved
        return extra, end

    def _forward_stages(self) -> list[int]:
        """The stages that do a forward in this round: if one does not, no stage before it does."""
        first = len(self.device)
        while first > 0 and self.forwards[first - 1] < self.count and not self._skips(first - 1):
            first -= 1
        return [*range(first, len(self.device))]

    def _skips(self, s: int) -> bool:
        """Whether the stage has forwards in reserve and its next gradient comes first."""
        later = s + 1
        if not self.skips or s == self.last or self.forwards[s] < self.forwards[later] + 2:
            return False
        seconds = self.times.forward[later] + self.times.input_gradient[later]
        gradient = self.clock[later] + seconds + self.times.send_backward[s]
        if self.clock[s] + self.times.forward[s] <= gradient:
            return False
        return gradient - self.clock[s] <= self.most_idle - self.idle[s]
