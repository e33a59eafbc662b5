"""ZBV: zero bubble with two stages per device in a V (Qi et al. 2024, arXiv version, section 6).

`automatic_v` is for any times and memory. After the warm-up of the handcrafted schedule, every
device does one forward and one input gradient per round, the later one on a microbatch's way first;
weight gradients fill the gaps as in `automatic`.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import cycle, islice, product

from stagewright.formulations.plans.actions import Action
from stagewright.formulations.schedules.order import B, Device, F, I, Order, Row, W, v_shape
from stagewright.formulations.schedules.published.automatic import (
    Construction,
    Goal,
    require_stages,
)
from stagewright.formulations.schedules.timing import ActivationMemory, StageTimes, activations


def automatic_v(
    times: StageTimes, microbatches: int, memory: ActivationMemory, goal: Goal = "makespan"
) -> Order:
    """The best order of the rules for short gaps and warm-ups; device d has d and 2 p - 1 - d.

    Each rule is tried again with the idle time that a device had less than the one with the most,
    as long as this helps. The goal ``span`` is the longest time from a device's first start to its
    last end.

    Raises InputError if a device has no room for one microbatch of both its stages.
    """
    device = v_shape(len(times.forward) // 2)
    memory.require_room(device)
    span_first = goal == "span"

    def cost(one: _VRounds) -> tuple[float, float]:
        return span_first and one.span(), one.makespan()

    tried: list[_VRounds] = []
    for extra, fills in product(_extra_forwards(times, memory), ((), (F,), (I,), (F, I))):
        better = _VRounds(device, times, microbatches, memory, fills).built(extra)
        while not tried or better is not tried[-1]:
            tried.append(better)
            slack = [max(better.idle) - idle for idle in better.idle]
            again = _VRounds(device, times, microbatches, memory, fills, slack).built(extra)
            better = min(better, again, key=cost)
    return min(tried, key=cost).order()


def _extra_forwards(times: StageTimes, memory: ActivationMemory) -> list[tuple[int, ...]]:
    """How many more forwards devices may do before their first microbatch returns.

    While it is on its way to the last device and back, as many fit as transfers leave time for. Of
    these at most 0, 1, 2, half and all are tried, if all forwards of the warm-up fit in memory.
    """
    devices = len(memory.limit)
    last, time = len(times.forward) - 1, 0.0
    extra = [0] * devices
    for d in reversed(range(devices - 1)):
        time += times.send_forward[d] + times.send_forward[last - d - 1]
        extra[d] = int(time / times.forward[d]) if times.forward[d] > 0 else 0
    pairs = [saved + memory.saved[last - d] for d, saved in enumerate(memory.saved[:devices])]
    room = min(
        int(2 * limit / pair) if pair > 0 else 0
        for limit, pair in zip(memory.limit, pairs, strict=True)
    )
    most = max(0, min(max(extra), room - 2 * devices + 1))
    tried = sorted({min(k, most) for k in (0, 1, 2, most // 2, most)})
    return [tuple(min(one, k) for one in extra) for k in tried]


class _VRounds(Construction):
    """The rounds of a V. Device d has the stages d ("down") and ``last`` - d ("up")."""

    def built(self, extra: Sequence[int] = ()) -> "_VRounds":
        """Schedule everything.

        ``extra`` are forwards per device before its first microbatch returns, beside those of ZBV.
        """
        self.extra = extra or [0] * len(self.rows)
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
        more = self.extra[d]
        yield from [d] * (2 * (len(self.rows) - d) - 1 + more)
        yield from islice(cycle((self.last - d, d)), 2 * d + self.extra[0] - more)

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


def in_units(paths: Sequence[Device], unit: int, microbatches: int) -> Order:
    """Microbatches start on every path two slots apart, in units of ``unit`` per path.

    Of S stages, stage s does microbatch i of a unit forward in slot s + 2 i, backward in slot
    2 S - 1 - s + 2 i. A unit starts 2 S slots after the one before it. Microbatch m takes path
    m mod the number of paths.
    """
    stages, count = len(paths[0]), len(paths)
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(1 + max(map(max, paths)))]
    for m in range(microbatches):
        path, place = paths[m % count], m // count
        first = 2 * stages * (place // unit) + 2 * (place % unit)
        for s, d in enumerate(path):
            rows[d].append((first + s, Action(s, F, m)))
            rows[d].append((first + 2 * stages - 1 - s, Action(s, B, m)))
    for row in rows:
        row.sort(key=lambda entry: entry[0])
    actions = tuple(tuple(action for _, action in row) for row in rows)
    return Order(actions, tuple(m % count for m in range(microbatches)))


@lru_cache(maxsize=8)
def zbv(
    devices: int,
    microbatches: int,
    times: StageTimes | None = None,
    memory: ActivationMemory | None = None,
    goal: Goal = "makespan",
) -> Order:
    """ZBV: device d has the stages d and 2 p - 1 - d; with ``times`` the order of `automatic_v`.

    At most 2 p microbatches of a stage, half a device's layers, are in flight on a device: the
    activations of 1F1B's first stage. With tF = tI = tW and m >= 2 p - 1 no device is idle from its
    first to its last computation; the makespan is 6 m + p - 1 such times. With ``times`` a limit in
    ``memory`` that allows less counts too.
    """
    if times is not None:
        device = v_shape(devices)
        require_stages(times, len(device))
        # A microbatch of a device's two stages counts as two.
        memory = (memory or activations(device, 2 * devices)).within(devices, device)
        return automatic_v(times, microbatches, memory, goal)
    return Order(tuple(_row(devices, d, microbatches) for d in range(devices)))


def _row(devices: int, d: int, microbatches: int) -> Row:
    # Planned for enough microbatches to fill the pipeline; those beyond m are left out.
    count = max(2 * devices - 1, microbatches)
    down, up, left = d, 2 * devices - 1 - d, devices - d
    f = [(s, F) for s in (down, up)]
    i = [(s, I) for s in (down, up)]
    w = [(s, W) for s in (down, up)]
    there, back = [f[0], i[0], w[0]], [f[1], i[1], w[1]]
    steps = [f[0]] * (2 * left - 1) + [f[1], f[0]] * d + back * left
    started, returned = 2 * left - 1 + d, devices
    while started < count:
        steps += there + back
        started, returned = started + 1, returned + 1
    steps += (there[1:] + back) * (count - returned)
    steps += [i[0], i[1]] * d + [i[0], w[0]] * left + [w[1]] * d + [w[0]] * d
    done = dict.fromkeys((*f, *i, *w), 0)
    row = []
    for stage, kind in steps:
        m = done[stage, kind]
        done[stage, kind] += 1
        if m < microbatches:
            row.append(Action(stage, kind, m))
    return tuple(row)
