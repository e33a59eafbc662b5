"""ZBV for any times and memory: two stages per device in a V, built in rounds.

After the warm-up of the handcrafted schedule, every device does one forward and one input gradient
per round, the later one on a microbatch's way first; weight gradients fill the gaps as in
`automatic`. Source of the idea: Qi et al. 2024, arXiv version, section 6.
"""

from collections.abc import Iterator

from stagewright.formulations.schedules.automatic import Goal
from stagewright.formulations.schedules.construction import Construction
from stagewright.formulations.schedules.memory import ActivationMemory
from stagewright.formulations.schedules.order import F, I, Order
from stagewright.formulations.schedules.placements import v_shape
from stagewright.formulations.schedules.timing import StageTimes


def automatic_v(
    times: StageTimes, microbatches: int, memory: ActivationMemory, goal: Goal = "makespan"
) -> Order:
    """The best order of four rules for short gaps, with the stages d and 2 p - 1 - d on device d.

    Each rule is tried again with the idle time that a device had less than the one with the most,
    as long as this helps. The goal ``span`` is the longest time from a device's first start to its
    last end.

    Raises
    ------
    InputError
        If a device has no room for one microbatch of both its stages.
    """
    device = v_shape(len(times.forward) // 2)
    memory.require_room(device)
    span_first = goal == "span"

    def cost(one: _Rounds) -> tuple[float, float]:
        return span_first and one.span(), one.makespan()

    tried: list[_Rounds] = []
    for fills in ((), (F,), (I,), (F, I)):
        better = _Rounds(device, times, microbatches, memory, fills).built()
        while not tried or better is not tried[-1]:
            tried.append(better)
            slack = [max(better.idle) - idle for idle in better.idle]
            again = _Rounds(device, times, microbatches, memory, fills, slack).built()
            better = min(better, again, key=cost)
    return min(tried, key=cost).order()


class _Rounds(Construction):
    """The rounds of a V. Device d has the stages d ("down") and ``last`` - d ("up")."""

    def built(self) -> "_Rounds":
        """Schedule everything."""
        self._warm_up()
        devices = range(len(self.rows))
        while min(self.inputs) < self.count:
            up = [d for d in devices if self._has_input(self.last - d)]
            for d in reversed(up):
                self._forward(self.last - d)
            for d in devices:
                if d not in up and self._has_input(d):
                    self._forward(d)
            down = [d for d in devices if self._has_gradient(d)]
            for d in devices:
                if d not in down and self._has_gradient(self.last - d):
                    self.input_gradient(self.last - d)
            for d in reversed(down):
                self.input_gradient(d)
        self.finish()
        return self

    def _warm_up(self) -> None:
        """Forwards of the first stage until its first microbatch returns, then of both in turn."""
        left = [self._first_forwards(d) for d in range(len(self.rows))]
        following = [next(one, None) for one in left]
        moved = True
        while moved:
            moved = False
            for d, stages in enumerate(left):
                s = following[d]
                while s is not None and (self.forwards[s] == self.count or self._has_input(s)):
                    if self.forwards[s] < self.count:
                        self._forward(s)
                    s, moved = next(stages, None), True
                following[d] = s

    def _first_forwards(self, d: int) -> Iterator[int]:
        yield from [d] * (2 * (len(self.rows) - d) - 1)
        yield from [self.last - d, d] * d

    def _has_input(self, s: int) -> bool:
        return self.forwards[s] < len(self.there[s])

    def _has_gradient(self, s: int) -> bool:
        return self.inputs[s] < len(self.back[s])

    def _forward(self, s: int) -> None:
        """A forward, if there is memory.

        Microbatches on their way to the second stage leave room for one there: else the devices
        could wait for memory forever. All others end without more memory.
        """
        d, up = self.device[s], self.last - self.device[s]
        outgoing = self.forwards[d] - self.forwards[up] + (s == d)
        least = outgoing * self.memory.saved[d] + self.memory.saved[up]
        if (s != d or least <= self.memory.limit[d]) and self.makes_room(s):
            self.forward(s)
