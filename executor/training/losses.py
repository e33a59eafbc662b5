"""Results of losses, a mean over samples or a sum with its count, and the scale of gradients."""

from collections.abc import Callable, Mapping
from math import frexp, inf, ldexp
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stagewright.graphs.documents.errors import InputError

Loss = Callable[..., Tensor | tuple[Tensor, Tensor]]

MIXED = (torch.bfloat16, torch.float16)  # compute types under autocast of float32 parameters
IGNORED = -100  # the label that torch's cross-entropy leaves out


def cross_entropy(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy as a sum and the number of labels, without those that are ``IGNORED``."""
    if not isinstance(output, Tensor):
        raise InputError(
            f"the model returns {_shown(output)}, of which cross-entropy cannot be: give a loss; "
            "or mini-batches that are dicts of its keywords, labels too, if it computes its loss"
        )
    total = F.cross_entropy(output, targets, reduction="sum", ignore_index=IGNORED)
    if targets.is_floating_point():  # probabilities of classes
        return total, torch.tensor(targets.numel() // targets.shape[1])
    return total, (targets != IGNORED).sum()


def loss_of_run(loss: Loss | None, inputs: object) -> tuple[Loss, bool]:
    """The loss of a run, and whether the model computes it: if ``inputs`` are keywords.

    Without either it is cross-entropy.
    """
    takes_loss = loss is None and isinstance(inputs, Mapping)
    return loss or (own_loss if takes_loss else cross_entropy), takes_loss


def own_loss(output: Tensor, targets: object) -> Tensor:
    """The loss that the model itself has computed, its only output."""
    return output


def read_loss(found: object) -> tuple[Tensor, Tensor | None]:
    """The number to differentiate, and its count; None for a mean.

    Raises InputError if ``found`` is not a valid result of a loss.
    """
    total, count = found, None
    if isinstance(found, tuple | list) and len(found) == 2:
        total, count = found[0], _as_count(found[1])
    fits = isinstance(total, Tensor) and total.numel() == 1 and total.requires_grad
    if not fits or (count is None and total is not found):
        raise InputError(
            "the loss must be a tensor of one number that depends on the output, or a pair "
            f"(sum, count) of such a tensor and a number, got {_shown(found)}"
        )
    assert isinstance(total, Tensor)
    return total, count


def read_measure(found: object) -> tuple[float, float | None]:
    """The value of a measure, and its count; None for a mean.

    Raises InputError if ``found`` is neither a number nor a pair of a sum and its count.
    """
    total, count = found, None
    if isinstance(found, tuple | list) and len(found) == 2:
        total, count = found[0], _as_count(found[1])
    fits = isinstance(total, int | float) or (isinstance(total, Tensor) and total.numel() == 1)
    if not fits or (count is None and total is not found):
        raise InputError(
            f"a measure must be one number or a pair (sum, count) of numbers, got {_shown(found)}"
        )
    assert isinstance(total, int | float | Tensor)
    return float(total), None if count is None else float(count)


def _as_count(count: object) -> Tensor | None:
    if isinstance(count, int | float):
        return torch.tensor(count)
    fits = isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex()
    return count.detach() if isinstance(count, Tensor) and fits else None


def _shown(found: object) -> str:
    if isinstance(found, tuple | list):
        return f"({', '.join(map(_shown, found))})"
    if not isinstance(found, Tensor):
        return type(found).__name__
    shape = f"a tensor of shape {tuple(found.shape)}"
    return shape if found.requires_grad else f"{shape} without a gradient"


def loss_scale_of(scaler: torch.amp.GradScaler | None, dtype: torch.dtype) -> "LossScale | None":
    """The scale of losses in a run; with float16 by torch's scaler, unless another is given."""
    if scaler is None and dtype == torch.float16:
        scaler = torch.amp.GradScaler("cpu")  # where the sums over ranks are made
    return LossScale(scaler) if scaler is not None and scaler.is_enabled() else None


class LossScale:
    """The ``factor`` of losses by torch's ``scaler``, the same on all ranks.

    The scaler is given a gradient that stands for those of all ranks: infinite if one of them is
    not finite. So it steps, and changes its scale, as for the whole model; ``left_out`` counts the
    updates without a step. The scale is of a mean: that of a sum is divided by the power of two
    below the count of the update before.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._number = torch.nn.Parameter(torch.zeros(()))
        self._optimizer = torch.optim.SGD([self._number], lr=0.0)
        scaler.scale(self._number.detach())  # from here on it has a scale
        self._exponent = self.left_out = 0
        self.factor = scaler.get_scale()

    def update(self, count: float | None, *, finite: bool) -> None:
        """Go on to the next step's factor, after one of ``finite`` gradients.

        ``count``: of the loss, where it is a sum.
        """
        self._exponent = frexp(count)[1] - 1 if count else 0
        self.left_out += not finite
        self._number.grad = torch.tensor(0.0 if finite else inf)
        self._scaler.unscale_(self._optimizer)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self.factor = ldexp(self._scaler.get_scale(), -self._exponent)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state, and what else the next factor depends on."""
        return {"scaler": self._scaler.state_dict(), "exponent": self._exponent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a state."""
        self._scaler.load_state_dict(state["scaler"])
        self._exponent = state["exponent"]
        self.factor = ldexp(self._scaler.get_scale(), -self._exponent)
