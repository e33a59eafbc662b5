"""Regions of the main stream and the co-run of weight gradients in them (Algorithm 1).

Two streams of one device while they run, each kernel as early as possible (section 4.1).

A kernel occupies a share of the device's multiprocessors. The main stream has priority: its
kernels run at full speed. A kernel of the sub-stream gets what is left: with share b next to a
main kernel of share a it runs at min(1, (1 - a) / b) of its speed. Before each kernel its stream
has a launch gap in which it occupies nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.formulations.backprop.problem import Kind, WindowTimes
from stagewright.formulations.backprop.training import Layers, single_device
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import require_amount

DONE = 1e-12  # of a kernel: what rounding leaves of it


def co_run(
    main: Sequence[int],
    sub: Sequence[int],
    seconds: Sequence[float],
    share: Sequence[float],
    before: Sequence[Sequence[int]],
    gap: float = 0.0,
) -> tuple[Floats, Floats]:
    """Starts and ends of n operations, shapes (n,).

    Parameters
    ----------
    main, sub
        The operations of each stream in order. Those of no stream take no time.
    seconds, share
        Of each operation alone; the share of the device that it occupies.
    before
        What must end before each operation starts.

    Raises
    ------
    InvalidPlan
        If the streams wait for each other.
    """
    run = _CoRun(main, sub, seconds, share, before, gap)
    while run.is_left():
        run.advance()
    return run.times()


class _CoRun:
    def __init__(
        self,
        main: Sequence[int],
        sub: Sequence[int],
        seconds: Sequence[float],
        share: Sequence[float],
        before: Sequence[Sequence[int]],
        gap: float,
    ) -> None:
        self._queues = [*main], [*sub]
        self._next, self._free = [0, 0], [0.0, 0.0]
        self._seconds, self._share, self._before, self._gap = seconds, share, before, gap
        self._left = list(seconds)
        self._starts: dict[int, float] = {}
        self._ends: dict[int, float] = {}
        self._placed = {*main, *sub}
        self._now = 0.0

    def is_left(self) -> bool:
        """Whether some kernel has not ended."""
        return any(i < len(queue) for i, queue in zip(self._next, self._queues, strict=True))

    def times(self) -> tuple[Floats, Floats]:
        """Starts and ends of all operations."""
        ends = np.array([self._end(i) for i in range(len(self._seconds))])
        return np.array([self._starts.get(i, end) for i, end in enumerate(ends)]), ends

    def advance(self) -> None:
        """Advance the clock until a kernel ends or begins to run."""
        begins = [self._begin(0), self._begin(1)]
        now = self._now = max(self._now, min(begins))
        if math.isinf(now):
            raise InvalidPlan("the streams wait for each other")
        running = [self._first(i) if begins[i] <= now else None for i in (0, 1)]
        rates = 1.0, self._rate(*running)
        ends = [self._ends_at(kernel, rate) for kernel, rate in zip(running, rates, strict=True)]
        until = min(*ends, *(begin for begin in begins if begin > now))
        for stream, kernel in enumerate(running):
            if kernel is None:
                continue
            self._starts.setdefault(kernel, now)
            self._left[kernel] -= rates[stream] * (until - now)
            if ends[stream] <= until or self._is_done(kernel):
                self._ends[kernel] = self._free[stream] = until
                self._next[stream] += 1
        self._now = until

    def _ends_at(self, kernel: int | None, rate: float) -> float:
        """When a kernel ends at its present rate."""
        if kernel is None:
            return math.inf
        if self._is_done(kernel):
            return self._now
        return self._now + self._left[kernel] / rate if rate > 0 else math.inf

    def _is_done(self, kernel: int) -> bool:
        return self._left[kernel] <= DONE * self._seconds[kernel]

    def _first(self, stream: int) -> int | None:
        """The kernel of a stream that runs next, or has begun."""
        at, queue = self._next[stream], self._queues[stream]
        return queue[at] if at < len(queue) else None

    def _begin(self, stream: int) -> float:
        """When the first kernel of a stream runs or has begun, after its gap."""
        kernel = self._first(stream)
        if kernel is None:
            return math.inf
        if kernel in self._starts:
            return self._starts[kernel]
        waits = (self._end(j) for j in self._before[kernel])
        return max(self._free[stream], *waits, 0.0) + self._gap

    def _end(self, i: int) -> float:
        """When an operation ends; infinite if that is not known yet."""
        if i not in self._ends:
            if i in self._placed:
                return math.inf
            end = max((self._end(j) for j in self._before[i]), default=0.0)
            if math.isinf(end):
                return end
            self._ends[i] = end
        return self._ends[i]

    def _rate(self, main: int | None, sub: int | None) -> float:
        """The speed of a kernel of the sub-stream."""
        if main is None or sub is None:
            return 1.0
        return min(1.0, (1 - self._share[main]) / self._share[sub])


@dataclass(frozen=True, slots=True)
class Streams:
    """The kernels of one device: ``layers`` with the share of each, and the launch gap.

    ``main_share`` has L shares of output gradients, then L of forwards; ``sub_share`` L of weight
    gradients.
    """

    layers: Layers
    main_share: tuple[float, ...]
    sub_share: tuple[float, ...]
    gap: float = 0.0

    def __post_init__(self) -> None:
        count = self.layers.count
        sizes = ("main_share", 2 * count), ("sub_share", count)
        for name, size in sizes:
            shares = getattr(self, name)
            if len(shares) != size or not all(0 < share <= 1 for share in shares):
                raise InputError(f"{name} needs {size} shares above 0 and up to 1")
        require_amount(self.gap, "gap")

    def main(self) -> list[tuple[Kind, int, float, float]]:
        """(kind, layer, seconds, share) in the order of the main stream."""
        count, layers = self.layers.count, self.layers
        shares = self.main_share
        backward: list[tuple[Kind, int, float, float]] = [
            ("dO", i, layers.output_gradient[i - 1], shares[i - 1]) for i in range(count, 0, -1)
        ]
        forward: list[tuple[Kind, int, float, float]] = [
            ("F", i, layers.forward[i - 1], shares[count + i - 1]) for i in range(1, count + 1)
        ]
        return [one for one in backward + forward if one[2] > 0]

    def evaluate(self, order: Sequence[int]) -> float:
        """Seconds of a window with the weight gradients of layers ``order`` in the sub-stream.

        Raises
        ------
        InvalidPlan
            If ``order`` is no order of the layers, or the streams wait for each other.
        """
        return self.timetable(order).end

    def timetable(self, order: Sequence[int]) -> WindowTimes:
        """Starts and ends of the operations of :func:`single_device`, as the streams run."""
        if sorted(order) != list(range(1, self.layers.count + 1)):
            raise InvalidPlan(f"{list(order)} is no order of layers 1 to {self.layers.count}")
        problem = single_device(self.layers)
        seconds = [one.seconds for one in problem.operations]
        share, before = [1.0] * len(seconds), [list[int]() for _ in seconds]
        main = []
        for kind, layer, _, occupied in self.main():
            main.append(problem.find(kind, layer))
            share[main[-1]] = occupied
        sub = [problem.find("dW", i) for i in order if self.layers.weight_gradient[i - 1] > 0]
        for i, occupied in enumerate(self.sub_share, start=1):
            share[problem.find("dW", i)] = occupied
        for i, j in problem.before:
            before[j].append(i)
        starts, ends = co_run(main, sub, seconds, share, before, self.gap)
        return WindowTimes(np.arange(len(seconds)), starts, ends)

    def bound(self) -> float:
        """No order takes less: the main stream alone, and the work in shares of the device."""
        main = self.main()
        alone = sum(one[2] for one in main) + self.gap * len(main)
        weights = zip(self.layers.weight_gradient, self.sub_share, strict=True)
        area = sum(one[2] * one[3] for one in main) + sum(t * share for t, share in weights)
        return max(alone, area)


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """N regions of the main stream and the weight gradients of L layers.

    Attributes
    ----------
    main
        T_main: seconds of the main kernels of each region, shape (N,).
    sub
        T_sub: seconds of each weight gradient in each region, next to its kernels, shape (L, N).
    speedup
        Of running a weight gradient next to a region's kernels, over both in turn, shape (L, N).
    ready, offset
        The region, and the seconds from its start, from which each weight gradient may run.
    last
        The last region in which each may run without delaying its layer's forward.
    """

    main: Floats
    sub: Floats
    speedup: Floats
    ready: Ints
    offset: Floats
    last: Ints

    def __post_init__(self) -> None:
        shape = (len(self.ready), len(self.main))
        if self.sub.shape != shape or self.speedup.shape != shape:
            raise InputError(f"sub and speedup need shape {shape}")


def regions_of(streams: Streams, ends: tuple[int, ...]) -> Regions:
    """Regions that stop before main kernels ``ends``, priced by the model of overlap.

    The main stream is not slowed, so that the speed-up is 1 plus the weight gradient's rate.
    """
    main, count = streams.main(), streams.layers.count
    starts = (0, *ends[:-1])
    if ends[-1] != len(main) or any(a >= b for a, b in zip(starts, ends, strict=True)):
        raise InputError(f"ends must rise to {len(main)}, the number of main kernels, got {ends}")
    region: Ints = np.repeat(np.arange(len(ends)), np.diff((0, *ends)))
    seconds = np.array([one[2] for one in main])
    share = np.array([one[3] for one in main])
    length = np.bincount(region, seconds + streams.gap).astype(float)
    rate = np.empty((count, len(ends)))
    for k, needed in enumerate(streams.sub_share):
        next_to = seconds * np.minimum(1.0, (1 - share) / needed) + streams.gap
        rate[k] = np.bincount(region, next_to) / length
    begin = np.concatenate(([0.0], np.cumsum(length)))[:-1]
    finish = np.cumsum(seconds + streams.gap)
    position = {(one[0], one[1]): p for p, one in enumerate(main)}
    ready, offset, last = np.zeros(count, np.int64), np.zeros(count), np.zeros(count, np.int64)
    limit = len(ends)  # the region of the next forward that takes time
    for i in range(count, 0, -1):
        p = position.get(("dO", i + 1))
        if p is not None:
            ready[i - 1] = region[min(p + 1, len(main) - 1)]
            offset[i - 1] = finish[p] - begin[ready[i - 1]]
        if ("F", i) in position:
            limit = int(region[position["F", i]])
        last[i - 1] = max(ready[i - 1], limit - 1)
    weight = np.array(streams.layers.weight_gradient)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        sub = np.where(weight > 0, weight / rate, 0.0)
    return Regions(length, sub, 1 + rate, ready, offset, last)
