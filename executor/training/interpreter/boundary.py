"""The values between two stages."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stagewright.executor.capture.shapes import Value


@dataclass(frozen=True, slots=True)
class Boundary:
    """The values between two stages: ``values`` of a whole microbatch.

    ``cut[a][b]`` is the range of sender a's samples that receiver b gets, None if both stages run
    on the same devices, so that each keeps its samples. ``by_sample`` says of each value whether
    its first dimension is the samples; other values are never cut.
    """

    values: tuple[Value, ...]
    by_sample: tuple[bool, ...]
    cut: list[list[tuple[int, int]]] | None

    def passing(self, below: int, above: int, *, in_receiver: bool) -> tuple[int, int]:
        """The samples that pass from lane ``below`` to ``above``, in the numbers of either."""
        assert self.cut is not None
        start, stop = self.cut[below][above]
        if not in_receiver:
            return start, stop
        before = sum(row[above][1] - row[above][0] for row in self.cut[:below])
        return before, before + stop - start

    def part(self, values: Sequence[Tensor | None], start: int, stop: int) -> list[Tensor | None]:
        """``values`` of the samples [start, stop)."""
        return [
            one[start:stop] if one is not None and cut else one
            for one, cut in zip(values, self.by_sample, strict=True)
        ]

    def shape(self, i: int, samples: int) -> tuple[int, ...]:
        """The shape of value ``i`` for that many samples."""
        shape = self.values[i].shape
        return (samples, *shape[1:]) if self.by_sample[i] else shape

    def joined(self, parts: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """Values joined from the samples in ``parts``."""
        if len(parts) == 1:
            return list(parts[0])
        return [
            torch.cat(pieces) if cut and pieces[0] is not None else pieces[0]
            for cut, pieces in zip(self.by_sample, zip(*parts, strict=True), strict=True)
        ]
