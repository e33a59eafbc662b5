"""A cost model of two streams on one device, for plans without a GPU (section 4.1).

A kernel occupies a share of the device's multiprocessors. The main stream has priority: its
kernels run at full speed. A kernel of the sub-stream gets what is left: with share b next to a
main kernel of share a it runs at min(1, (1 - a) / b) of its speed. Before each kernel its stream
has a launch gap in which it occupies nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.formulations.backprop.problem import Timetable
from stagewright.formulations.backprop.training import Layers, single_device
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import require_amount


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

    def main(self) -> list[tuple[str, int, float, float]]:
        """(kind, layer, seconds, share) in the order of the main stream."""
        count, layers = self.layers.count, self.layers
        shares = self.main_share
        backward = [
            ("dO", i, layers.output_gradient[i - 1], shares[i - 1]) for i in range(count, 0, -1)
        ]
        forward = [
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

    def timetable(self, order: Sequence[int]) -> Timetable:
        """Starts and ends of the operations of :func:`single_device`, as the streams run."""
        if sorted(order) != list(range(1, self.layers.count + 1)):
            raise InvalidPlan(f"{list(order)} is no order of layers 1 to {self.layers.count}")
        sub = [("dW", i, self.layers.weight_gradient[i - 1], self.sub_share[i - 1]) for i in order]
        return _Run(self).run(self.main(), [one for one in sub if one[2] > 0])

    def sequential(self) -> float:
        """Seconds with one stream: every kernel and gap in turn."""
        kernels = len(self.main()) + sum(one > 0 for one in self.layers.weight_gradient)
        layers = self.layers
        work = (*layers.forward, *layers.output_gradient, *layers.weight_gradient)
        return sum(work) + kernels * self.gap

    def bound(self) -> float:
        """No order takes less: the main stream alone, and the work in shares of the device."""
        main = self.main()
        alone = sum(one[2] for one in main) + self.gap * len(main)
        weights = zip(self.layers.weight_gradient, self.sub_share, strict=True)
        area = sum(one[2] * one[3] for one in main) + sum(t * share for t, share in weights)
        return max(alone, area)


class _Run:
    """The two streams while they run; operations are named (kind, layer)."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.problem = single_device(streams.layers)
        self.starts = np.full(len(self.problem.operations), math.nan)
        self.ends = np.full(len(self.problem.operations), -1.0)
        for i in self.problem.topological:
            if self.problem.resource[i] < 0:
                self.ends[i] = math.nan  # follows what it waits for
        self.before: list[list[int]] = [[] for _ in self.ends]
        for i, j in self.problem.before:
            self.before[j].append(i)

    def ready(self, i: int, free: float) -> float:
        """When operation i may start, after its gap; infinite if something has not ended."""
        waits = [self.end(j) for j in self.before[i]]
        return max([free, *waits]) + self.streams.gap

    def end(self, i: int) -> float:
        if math.isnan(self.ends[i]):
            return max([self.end(j) for j in self.before[i]], default=0.0)
        return math.inf if self.ends[i] < 0 else float(self.ends[i])

    def run(
        self, main: list[tuple[str, int, float, float]], sub: list[tuple[str, int, float, float]]
    ) -> Timetable:
        """Main kernels at full speed; of the sub-stream the current kernel fills what is left."""
        rows = [[self.problem.find(kind, i), t, share] for kind, i, t, share in main]  # type: ignore[arg-type]
        others = [[self.problem.find("dW", i), t, share] for _, i, t, share in sub]
        free, now = [0.0, 0.0], 0.0
        while rows or others:
            one = self._begins(rows, free[0])
            other = self._begins(others, free[1])
            now = max(now, min(one, other))
            if math.isinf(now):
                raise InvalidPlan("the streams wait for each other")
            runs = bool(rows) and one <= now
            rate = 0.0
            if others and other <= now:
                rate = min(1.0, (1 - rows[0][2]) / others[0][2]) if runs else 1.0
            ends = (
                now + rows[0][1] if runs else math.inf,
                now + others[0][1] / rate if rate > 0 else math.inf,
            )
            begins = [begin for begin in (one, other) if begin > now]
            until = min(*ends, *begins)
            for stream, (queue, speed) in enumerate(((rows, float(runs)), (others, rate))):
                if speed > 0 and self._advance(queue, now, until, speed, ends[stream] <= until):
                    free[stream] = until
            now = until
        return self._timetable()

    def _begins(self, rows: list[list[float]], free: float) -> float:
        """When the first kernel of a stream runs or has begun."""
        if not rows:
            return math.inf
        i = int(rows[0][0])
        return self.ready(i, free) if math.isnan(self.starts[i]) else float(self.starts[i])

    def _advance(
        self, rows: list[list[float]], now: float, until: float, rate: float, ends: bool
    ) -> bool:
        """Run a stream's first kernel; return whether it ends, as ``ends`` says."""
        i = int(rows[0][0])
        if math.isnan(self.starts[i]):
            self.starts[i] = now
        rows[0][1] -= rate * (until - now)
        if ends:
            self.ends[i] = until
            rows.pop(0)
        return ends

    def _timetable(self) -> Timetable:
        operation = np.arange(len(self.ends))
        ends = np.array([self.end(i) for i in range(len(operation))])
        empty = np.isnan(self.ends)
        return Timetable(operation, np.where(empty, ends, self.starts), ends)
