"""Two streams of one device while they run, each kernel as early as possible (section 4.1).

A kernel occupies a share of the device's multiprocessors. The main stream has priority: its
kernels run at full speed. A kernel of the sub-stream gets what is left: with share b next to a
main kernel of share a it runs at min(1, (1 - a) / b) of its speed. Before each kernel its stream
has a launch gap in which it occupies nothing.
"""

import math
from collections.abc import Sequence

import numpy as np

from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InvalidPlan

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
    run = _Run(main, sub, seconds, share, before, gap)
    while run.is_left():
        run.advance()
    return run.times()


class _Run:
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
