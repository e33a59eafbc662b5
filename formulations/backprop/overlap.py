"""A cost model of two streams on one device, for plans without a GPU: see `co_run`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.formulations.backprop.co_run import co_run
from stagewright.formulations.backprop.problem import Kind, Timetable
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

    def timetable(self, order: Sequence[int]) -> Timetable:
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
        return Timetable(np.arange(len(seconds)), starts, ends)

    def bound(self) -> float:
        """No order takes less: the main stream alone, and the work in shares of the device."""
        main = self.main()
        alone = sum(one[2] for one in main) + self.gap * len(main)
        weights = zip(self.layers.weight_gradient, self.sub_share, strict=True)
        area = sum(one[2] * one[3] for one in main) + sum(t * share for t, share in weights)
        return max(alone, area)
