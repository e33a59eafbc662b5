"""An order in the making: computations are appended with their times, weight gradients fill gaps.

The part that the zero-bubble heuristics share. What it knows of the papers is their rule for weight
gradients (Qi et al. 2024, section 3.1).
"""

from collections import deque
from collections.abc import Collection, Sequence

from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.formulations.schedules.order import Device, F, I, Order, W
from stagewright.formulations.schedules.timing import ActivationMemory, StageTimes
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
