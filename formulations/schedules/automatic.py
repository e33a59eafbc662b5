"""ZB1P and ZB2P: zero-bubble schedules for any times and memory (Qi et al. 2024, section 3.1).

The heuristic of the paper. Before the first backward every stage does as many forwards as memory
allows and time leaves. Then rounds of one forward and one input gradient per stage follow; weight
gradients fill the gaps, and run where memory is short. Where the paper leaves a choice all
combinations are tried.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.formulations.schedules.order import F, I, Order, W
from stagewright.formulations.schedules.timing import StageTimes, equal_times
from stagewright.graphs.documents.errors import InputError

Goal = Literal["makespan", "span"]


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """What a microbatch occupies on each of S stages, and how much there is, in any unit.

    Attributes
    ----------
    saved
        From the forward to the input gradient.
    kept
        From the input gradient to the weight gradient; at most ``saved``.
    limit
        For all microbatches of the stage together.

    Raises
    ------
    InputError
        If a limit is below one microbatch.
    """

    saved: tuple[float, ...]
    kept: tuple[float, ...]
    limit: tuple[float, ...]

    def __post_init__(self) -> None:
        rows = zip(self.saved, self.kept, self.limit, strict=True)
        for s, (saved, kept, limit) in enumerate(rows):
            if not 0 <= kept <= saved:
                raise InputError(f"kept[{s}] must be 0 to {saved} (saved[{s}]), got {kept}")
            if limit < saved:
                raise InputError(f"limit[{s}] must be at least {saved} (saved[{s}]), got {limit}")


def activations(stages: int, limit: float) -> ActivationMemory:
    """A limit in microbatches for every stage; all is kept until the weight gradient."""
    ones = (1.0,) * stages
    return ActivationMemory(ones, ones, (float(limit),) * stages)


@lru_cache(maxsize=8)
def zb1p(devices: int, microbatches: int, times: StageTimes | None = None) -> Order:
    """The heuristic with at most p microbatches in flight per stage: 1F1B's memory."""
    return _within(devices, devices, microbatches, times)


@lru_cache(maxsize=8)
def zb2p(devices: int, microbatches: int, times: StageTimes | None = None) -> Order:
    """The heuristic with at most 2 p microbatches in flight per stage: twice 1F1B's memory."""
    return _within(2 * devices, devices, microbatches, times)


def _within(limit: int, devices: int, microbatches: int, times: StageTimes | None) -> Order:
    times = times or equal_times(devices)
    if len(times.forward) != devices:
        raise InputError(f"the times are of {len(times.forward)} stages, not of {devices}")
    return automatic(times, microbatches, activations(devices, limit))


def automatic(
    times: StageTimes, microbatches: int, memory: ActivationMemory, goal: Goal = "makespan"
) -> Order:
    """The best order of the heuristic, with stage s on device s.

    The goal ``span`` is the paper's: the longest time from a device's first start to its last end.
    """
    tried = [
        _Construction(times, microbatches, memory, *choices).built()
        for choices in product((True, False), repeat=3)
    ]
    best = min(tried, key=lambda one: (one.cost(goal), one.cost("makespan")))
    return best.order()


class _Construction:
    """The rows in the making, with the time and memory of each stage.

    ``late`` admits a forward that delays the first backward. ``skips`` leaves a forward for a later
    round if the next gradient would wait for it. ``fills`` puts a weight gradient also into a gap
    that is shorter and does not make the longest idle time of all stages longer.
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
        stages = len(times.forward)
        self.times, self.memory = times, memory
        self.stages, self.count = stages, microbatches
        self.late, self.skips, self.fills = late, skips, fills
        self.kinds: list[list[ActionKind]] = [[] for _ in range(stages)]
        self.clock, self.idle, self.first = [0.0] * stages, [0.0] * stages, [0.0] * stages
        self.most_idle, self.used = 0.0, [0.0] * stages
        self.forwards, self.inputs, self.weights = [0] * stages, [0] * stages, [0] * stages
        # When the inputs of a stage's forwards and the gradients of its outputs arrive.
        self.there: list[list[float]] = [[] for _ in range(stages)]
        self.back: list[list[float]] = [[] for _ in range(stages)]
        self.there[0] = [0.0] * microbatches

    def built(self) -> "_Construction":
        """Schedule everything."""
        self._warm_up()
        for m in range(1, self.count):
            for s in self._forward_stages():
                if self._makes_room(s):
                    self._fill_gap(s, self.there[s][self.forwards[s]])
                    self._forward(s)
            for s in reversed(range(self.stages)):
                self._fill_gap(s, self.back[s][m])
                self._input_gradient(s)
        for s in range(self.stages):
            while self.weights[s] < self.count:
                self._weight_gradient(s)
        return self

    def cost(self, goal: Goal) -> float:
        """The makespan, or the longest span of a stage."""
        if goal == "makespan":
            return max(self.clock)
        return max(end - start for start, end in zip(self.first, self.clock, strict=True))

    def order(self) -> Order:
        """The order of the rows; each kind processes microbatches by number."""
        rows = []
        for s, kinds in enumerate(self.kinds):
            numbers = {kind: iter(range(self.count)) for kind in (F, I, W)}
            rows.append(tuple(Action(s, kind, next(numbers[kind])) for kind in kinds))
        return Order(tuple(rows))

    def _warm_up(self) -> None:
        """Forwards until memory is full or the first gradient arrives, then its backward."""
        for s in range(self.stages):
            self._forward(s)
        extra = [0] * self.stages
        gradient = self.clock[-1] + self.times.input_gradient[-1]
        for s in reversed(range(self.stages - 1)):
            gradient += self.times.send_backward[s]
            extra[s], end = self._before(s, gradient)
            gradient = max(end, gradient) + self.times.input_gradient[s]
        for s in range(self.stages):
            if s > 0:  # one forward less than the stage before, as long as that has some left
                ahead = extra[s - 1] + 1 < self.count
                extra[s] = min(extra[s], max(0, extra[s - 1] - ahead))
            for _ in range(extra[s]):
                self._forward(s)
        for s in reversed(range(self.stages)):
            self._input_gradient(s)

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
        first = self.stages
        while first > 0 and self.forwards[first - 1] < self.count and not self._skips(first - 1):
            first -= 1
        return [*range(first, self.stages)]

    def _skips(self, s: int) -> bool:
        """Whether the stage has forwards in reserve and its next gradient comes first."""
        later = s + 1
        if not self.skips or later == self.stages or self.forwards[s] < self.forwards[later] + 2:
            return False
        seconds = self.times.forward[later] + self.times.input_gradient[later]
        gradient = self.clock[later] + seconds + self.times.send_backward[s]
        if self.clock[s] + self.times.forward[s] <= gradient:
            return False
        return gradient - self.clock[s] <= self.most_idle - self.idle[s]

    def _makes_room(self, s: int) -> bool:
        """Run weight gradients until a forward fits; whether it can run."""
        if s > 0 and self.forwards[s] == self.forwards[s - 1]:
            return False
        while self.used[s] + self.memory.saved[s] > self.memory.limit[s]:
            if self.weights[s] == self.inputs[s]:
                return False
            self._weight_gradient(s)
        return True

    def _fill_gap(self, s: int, arrival: float) -> None:
        """Weight gradients while the stage waits."""
        seconds = self.times.weight_gradient[s]
        while self.weights[s] < self.inputs[s] and self.clock[s] + seconds <= arrival:
            self._weight_gradient(s)
        gap = arrival - self.clock[s]
        grows = gap > self.most_idle - self.idle[s]
        if self.weights[s] < self.inputs[s] and gap > 0 and (self.fills or grows):
            self._weight_gradient(s)

    def _forward(self, s: int) -> None:
        done = self.forwards[s]
        end = self._do(s, F, self.there[s][done], self.times.forward[s], self.memory.saved[s])
        if done == 0:
            self.first[s] = end - self.times.forward[s]
        self.forwards[s] = done + 1
        if s + 1 < self.stages:
            self.there[s + 1].append(end + self.times.send_forward[s])
        else:
            self.back[s].append(end)

    def _input_gradient(self, s: int) -> None:
        arrival = self.back[s][self.inputs[s]]
        freed = self.memory.kept[s] - self.memory.saved[s]
        end = self._do(s, I, arrival, self.times.input_gradient[s], freed)
        self.inputs[s] += 1
        if s > 0:
            self.back[s - 1].append(end + self.times.send_backward[s - 1])

    def _weight_gradient(self, s: int) -> None:
        self._do(s, W, 0.0, self.times.weight_gradient[s], -self.memory.kept[s])
        self.weights[s] += 1

    def _do(self, s: int, kind: ActionKind, ready: float, seconds: float, saved: float) -> float:
        """Append a computation; return its end."""
        start = self.clock[s]
        if ready > start:
            if self.kinds[s]:
                self.idle[s] += ready - start
                self.most_idle = max(self.most_idle, self.idle[s])
            start = ready
        self.clock[s] = start + seconds
        self.used[s] += saved
        self.kinds[s].append(kind)
        return self.clock[s]
