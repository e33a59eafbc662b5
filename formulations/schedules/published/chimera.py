"""Chimera: two pipelines in opposite directions on the same devices (Li and Hoefler 2021).

DualPipe and DualPipeV: forwards of one direction next to backwards of the other.

Both are the eight steps of DeepSeek's schedule (DeepSeek-V3 technical report, 2025, section 3.2.1,
and its public program). A step alternates *phases*: the two stages of a device. The pairs of a
forward and a backward in steps 4 and 5, which DeepSeek overlaps, stand next to each other here.
"""

from collections import deque
from functools import lru_cache

from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.formulations.schedules.order import B, F, I, Order, Row, W, both_directions, wave
from stagewright.formulations.schedules.published.automatic import require_at_least, require_even
from stagewright.formulations.schedules.published.zbv import in_units


@lru_cache(maxsize=8)
def dualpipe(devices: int, microbatches: int) -> Order:
    """DualPipe: even microbatches go down (stage s on device s), odd ones up.

    With times F, B, W of a stage and F&B of an overlapped pair, which ends as one, the bubble is
    (p / 2 - 1) (F&B + B - 3 W). Run one after the other, the parts of a pair deliver earlier, and
    the bubble is at most this with F&B = F + B. A device has the weights of two stages and at most
    p + 1 microbatches in flight.

    Raises InputError if p or m is odd, or m < 2 p.
    """
    require_even("DualPipe", "devices", devices)
    require_even("DualPipe", "microbatches", microbatches)
    require_at_least("DualPipe", "microbatches (2 p)", microbatches, 2 * devices)
    half, rows = devices // 2, []
    for d in range(devices):
        upper = int(d >= half)  # its first phase goes up
        stages, place = (d, devices - 1 - d), min(d, devices - 1 - d)
        phases = ((stages[upper], upper, 2), (stages[1 - upper], 1 - upper, 2))
        rows.append(_Steps(phases).row(half, place, microbatches // 2))
    return Order(tuple(rows), tuple(m % 2 for m in range(microbatches)))


@lru_cache(maxsize=8)
def dualpipe_v(devices: int, microbatches: int) -> Order:
    """DualPipeV: DualPipe on 2 p devices, folded in the middle: stages in a V, no second copies.

    Its bubble is DualPipe's on 2 p devices, (p - 1) (F&B + B - 3 W) of its smaller stages; at most
    2 p + 1 microbatches are in flight on a device.

    Raises InputError if m < 2 p.
    """
    require_at_least("DualPipeV", "microbatches (2 p)", microbatches, 2 * devices)
    last = 2 * devices - 1
    rows = [
        _Steps(((d, 0, 1), (last - d, 0, 1))).row(devices, d, microbatches) for d in range(devices)
    ]
    return Order(tuple(rows))


class _Steps:
    """The row of a device in the making.

    ``phases`` holds per phase its stage, its first microbatch and the step to the next one.
    """

    def __init__(self, phases: tuple[tuple[int, int, int], tuple[int, int, int]]) -> None:
        self.phases = phases
        self.actions: list[Action] = []
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.weights: deque[Action] = deque()

    def row(self, half: int, place: int, microbatches: int) -> Row:
        """The eight steps of the device ``place``, counted from an end, with m per phase."""
        after = half - place - 1
        self._fill(place, after)
        for _ in range(microbatches - 2 * half + place + 1):  # 4
            self._forward(0)
            self._backward(1)
            self._forward(1)
            self._backward(0)
        self._drain(place, after)
        return tuple(self.actions)

    def _fill(self, place: int, after: int) -> None:
        for _ in range(2 * after):  # 1
            self._forward(0)
        for _ in range(place + 1):  # 2
            self._forward(0)
            self._forward(1)
        for _ in range(after):  # 3
            self._input_gradient(1)
            self._weight_gradient()
            self._forward(1)

    def _drain(self, place: int, after: int) -> None:
        for _ in range(after):  # 5
            self._backward(1)
            self._forward(1)
            self._backward(0)
        for i in range(2 * (place + 1)):  # 6: the later half puts off its weight gradients
            gradient = self._backward if i <= place else self._input_gradient
            gradient(1 - i % 2)
        for _ in range(after):  # 7
            self._weight_gradient()
            self._input_gradient(0)
        while self.weights:  # 8
            self._weight_gradient()

    def _forward(self, phase: int) -> None:
        self._add(F, phase, self.forwards)

    def _backward(self, phase: int) -> None:
        self._add(B, phase, self.backwards)

    def _input_gradient(self, phase: int) -> None:
        one = self._add(I, phase, self.backwards)
        self.weights.append(Action(one.stage, W, one.microbatch))

    def _weight_gradient(self) -> None:
        self.actions.append(self.weights.popleft())

    def _add(self, kind: ActionKind, phase: int, counts: list[int]) -> Action:
        stage, first, step = self.phases[phase]
        action = Action(stage, kind, first + step * counts[phase])
        counts[phase] += 1
        self.actions.append(action)
        return action


@lru_cache(maxsize=8)
def hanayo(devices: int, waves: int, microbatches: int) -> Order:
    """Hanayo with 2 w stages per device, in units of p microbatches.

    With one wave it is Chimera on twice the devices, folded at the middle: both directions become
    the two ways of one V, and no stage has two copies (section 3.2). With forwards and backwards of
    equal time a device is idle for 2 p - 2 slots, of a stage's forward or backward each, if m is a
    multiple of p: (2 p - 2) / (4 w m + 2 p - 2) of the makespan.
    """
    return in_units((wave(devices, waves),), devices, microbatches)


@lru_cache(maxsize=8)
def chimera(devices: int, microbatches: int) -> Order:
    """Chimera: even microbatches go down (stage s on device s), odd ones up.

    Units of p microbatches are concatenated directly (section 3.5): the next unit's forwards fill
    the bubbles at the end of a unit. With forwards and backwards of equal time the bubble is
    (p - 2) / (2 m + p - 2) of the makespan if m is a multiple of p (table 2). A device keeps from
    p / 2 + 1 to p microbatches in flight.

    Raises InputError if the number of devices or of microbatches is odd.
    """
    require_even("Chimera", "devices", devices)
    require_even("Chimera", "microbatches", microbatches)
    return in_units(both_directions(devices), devices // 2, microbatches)
