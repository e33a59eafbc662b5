"""Where the gradients of a stage's parameters are summed up, and for how long."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn


class Gradients(Protocol):
    """The gradients that an update takes.

    Those of ``tied`` parameters are summed up over other devices than those of the others.
    """

    @property
    def parts(self) -> list[Tensor]:
        """Tensors that hold all gradients but those of tied parameters."""

    @property
    def views(self) -> list[Tensor | None]:
        """Every parameter's gradient, None for those that are left out."""

    def leave_out(self, left_out: Collection[int]) -> None:
        """Give no gradient to the parameters at these positions."""

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a factor."""

    def receive(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let backwards add to these gradients."""

    def hand_over(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the gradients as ``.grad`` of the parameters, for the optimizer."""

    def clear(self) -> None:
        """Forget their values, after an update."""


class FlatGradients:
    """Flat tensors, one for each type, with a view for every parameter: all-reduces copy nothing.

    They are kept over updates.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], tied: Collection[int]) -> None:
        views: dict[int, Tensor] = {}
        made: dict[bool, list[Tensor]] = {False: [], True: []}
        for is_tied, flat in made.items():
            chosen = [(i, one) for i, one in enumerate(parameters) if (i in tied) == is_tied]
            for dtype in dict.fromkeys(one.dtype for _, one in chosen):
                same = [(i, one) for i, one in chosen if one.dtype == dtype]
                flat.append(same[0][1].new_zeros(sum(one.numel() for _, one in same)))
                parts = flat[-1].split([one.numel() for _, one in same])
                for (i, one), part in zip(same, parts, strict=True):
                    views[i] = part.view_as(one)
        self.parts, self._tied = made[False], made[True]
        self.views: list[Tensor | None] = [views[i] for i in range(len(parameters))]

    def leave_out(self, left_out: Collection[int]) -> None:
        """Give no gradient to the parameters at these positions."""
        self.views = [None if i in left_out else view for i, view in enumerate(self.views)]

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a factor."""
        for one in chain(self.parts, self._tied):
            one.mul_(factor)

    def receive(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let backwards add to the views."""
        for one, view in zip(parameters, self.views, strict=True):
            one.grad = view

    def hand_over(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the views as ``.grad``; parameters left out have zeros, as autograd gives them."""
        self.receive(parameters)

    def clear(self) -> None:
        """Set all gradients to zero."""
        for one in chain(self.parts, self._tied):
            one.zero_()


@dataclass(slots=True)
class ReleasedGradients:
    """Gradients that autograd makes in the first backward, and that the update releases."""

    parameters: Sequence[nn.Parameter]
    tied: Collection[int]
    left_out: Collection[int] = ()

    @property
    def parts(self) -> list[Tensor]:
        """The gradients of parameters that are not tied."""
        return [one for i, one in enumerate(self.views) if one is not None and i not in self.tied]

    @property
    def views(self) -> list[Tensor | None]:
        """Every gradient; zeros for a parameter without a gradient from this update's backwards."""
        for i, one in enumerate(self.parameters):
            if i in self.left_out:
                one.grad = None
            elif one.grad is None:
                one.grad = torch.zeros_like(one)
        return [one.grad for one in self.parameters]

    def leave_out(self, left_out: Collection[int]) -> None:
        """Give no gradient to the parameters at these positions."""
        self.left_out = {*self.left_out, *left_out}

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a factor."""
        for one in self.views:
            if one is not None:
                one.mul_(factor)

    def receive(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do nothing before backwards, which make the gradients."""

    def hand_over(self, parameters: Sequence[nn.Parameter]) -> None:
        """Complete the gradients that backwards made with zeros, as ``.grad`` of the parameters."""
        _ = self.views

    def clear(self) -> None:
        """Release all gradients."""
        for one in self.parameters:
            one.grad = None
