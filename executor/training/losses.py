"""Results of losses: a mean over samples, or a sum and the count to divide it by."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stagewright.graphs.documents.errors import InputError

Loss = Callable[..., Tensor | tuple[Tensor, Tensor]]

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
