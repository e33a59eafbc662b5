"""How a tensor is sent, so that its copy has the same strides.

Kernels add up in another order if strides differ: with them, a copy gives the same results to the
bit. An expanded dimension is sent once, and elements that a view leaves out are not sent.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides and type of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Tensor) -> "Layout":
        """The layout of ``value``."""
        return cls(tuple(value.shape), value.stride(), value.dtype)

    @property
    def _order(self) -> list[int]:
        """The dimensions from the widest stride to the closest."""
        return sorted(range(len(self.shape)), key=lambda i: -self.strides[i])

    @property
    def _once(self) -> tuple[int, ...]:
        """The shape with every expanded dimension reduced to 1."""
        pairs = zip(self.shape, self.strides, strict=True)
        return tuple(min(1, size) if stride == 0 else size for size, stride in pairs)

    def packed(self, value: Tensor) -> Tensor:
        """The elements of ``value`` in a row."""
        for i, size in enumerate(self._once):
            value = value.narrow(i, 0, size)
        return value.permute(self._order).contiguous().view(-1)

    def room(self, device: torch.device) -> Tensor:
        """Memory for the packed tensor."""
        return torch.empty(torch.Size(self._once).numel(), dtype=self.dtype, device=device)

    def unpacked(self, row: Tensor) -> Tensor:
        """A tensor of this layout from its elements in a row."""
        order = self._order
        ordered = row.view([self._once[i] for i in order])
        found = ordered.permute(sorted(range(len(order)), key=order.__getitem__))
        found = found.expand(self.shape)
        if found.stride() == self.strides or 0 in self.shape:
            return found
        return torch.empty_strided(
            self.shape, self.strides, dtype=self.dtype, device=row.device
        ).copy_(found)


END = Layout((1,), (1,), torch.uint8)
"""Of the value that says that an operator has ended."""
