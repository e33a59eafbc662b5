"""Sums over ranks for an update: the counts of losses, and the squared norm of gradients.

They are made on the host, by gloo, and overlap with computations.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite, sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.graphs.documents.errors import InputError


@dataclass(slots=True)
class Total:
    """A sum over ranks that may be in flight: losses that have a count, counts, squares."""

    numbers: Tensor
    work: dist.Work | None

    def counted(self) -> float | None:
        """Wait for the count of the summed losses; None where they are means."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return float(self.numbers[1]) if self.numbers[0] else None

    def factor(self, clip_norm: float = inf, share: float = 1.0) -> float:
        """The factor of summed gradients, for a norm of at most ``clip_norm``.

        ``share`` is the weight of a loss that is a mean.

        The small number in the denominator is that of ``torch.nn.utils.clip_grad_norm_``.
        """
        count = self.counted()
        scale = share if count is None else 1 / count
        if clip_norm == inf:
            return scale
        norm = scale * sqrt(float(self.numbers[2]))
        return scale * min(1.0, clip_norm / (norm + 1e-6))


def begin_total(
    counts: Iterable[Tensor | None], squares: float, group: dist.ProcessGroup | None
) -> Total:
    """Begin the sums over ranks of the ``counts`` of losses and the ``squares`` of gradients."""
    known = [float(count) for count in counts if count is not None]
    for count in known:
        if not (isfinite(count) and count >= 0):
            raise InputError(f"the loss counts {count:g}; a count must be a number from 0 on")
    numbers = torch.tensor([len(known), sum(known), squares], dtype=torch.float64)
    work = None if group is None else dist.all_reduce(numbers, group=group, async_op=True)
    return Total(numbers, work)
