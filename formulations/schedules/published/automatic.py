"""ZB1P and ZB2P: zero-bubble schedules for any times and memory (Qi et al. 2024, section 3.1).

The heuristic of the paper. Before the first backward every stage does as many forwards as memory
allows and time leaves. Then rounds of one forward and one input gradient per stage follow; weight
gradients fill the gaps, and run where memory is short. Where the paper leaves a choice all
combinations are tried.
"""

from functools import lru_cache
from itertools import product
from typing import Literal

from stagewright.formulations.schedules.order import F, I, Order, line
from stagewright.formulations.schedules.published.construction import Construction, require_stages
from stagewright.formulations.schedules.timing import (
    ActivationMemory,
    StageTimes,
    activations,
    equal_times,
)

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
