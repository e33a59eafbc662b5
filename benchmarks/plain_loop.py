"""An oracle for models of any origin: torch's own loop over microbatches, from the forward alone.

It knows neither layers nor stages: it calls the model as its author does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Looped:
    """The whole state dict and the mean loss of every mini-batch."""

    state: dict[str, Tensor]
    losses: tuple[float, ...]


def loop(
    model: nn.Module,
    batches: Sequence[Any],
    microbatches: int,
    optimizer: MakeOptimizer,
    shares: Sequence[Sequence[int]] = (),
    loss: Callable[..., Tensor] | None = None,
) -> Looped:
    """Do a step for every mini-batch; ``model`` is trained in place.

    A mini-batch is a dict of keywords, of which the model returns the loss, or a pair (inputs,
    targets) for ``loss``, by default cross-entropy. A step's gradient is the mean over its
    microbatches and, where replicas divide each of them, over the ``shares`` of a microbatch: the
    samples of each replica.
    """
    stepping, losses = optimizer(model.parameters()), []
    for batch in batches:
        stepping.zero_grad()
        pieces = cut(batch, microbatches)
        if shares:
            pieces = [taken(piece, rows) for piece in pieces for rows in shares]
        total = 0.0
        for piece in pieces:
            share = loss_of(model, piece, loss) / len(pieces)
            share.backward()
            total += share.item()
        stepping.step()
        losses.append(total)
    return Looped(dict(model.state_dict()), tuple(losses))


def loss_of(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None = None) -> Tensor:
    """The loss of a whole batch."""
    if isinstance(batch, Mapping):
        return own_loss(model(**batch))
    inputs, targets = batch
    return (loss or nn.functional.cross_entropy)(model(inputs), targets)


def own_loss(output: Any) -> Tensor:
    """The loss in what a model returns: its entry, or the number of a tuple."""
    if isinstance(output, Mapping):
        found: Tensor = output["loss"]
        return found
    if isinstance(output, tuple) and not hasattr(output, "loss"):
        return next(one for one in output if isinstance(one, Tensor) and one.numel() == 1)
    return output if isinstance(output, Tensor) else output.loss


def gradients(model: nn.Module, batch: Any) -> tuple[float, dict[str, Tensor | None]]:
    """The loss of a batch, and every parameter's gradient by the first of its names."""
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    return loss.item(), {name: one.grad for name, one in model.named_parameters()}


def cut(batch: Any, count: int) -> list[Any]:
    """``count`` equal pieces of consecutive samples; what is no tensor is in each of them."""
    if isinstance(batch, Tensor):
        if len(batch) % count:
            raise ValueError(f"{len(batch)} samples, {count} pieces")
        return list(batch.split(len(batch) // count))
    if isinstance(batch, Mapping):
        of_key = {key: cut(value, count) for key, value in batch.items()}
        return [{key: of_key[key][i] for key in of_key} for i in range(count)]
    if isinstance(batch, tuple):
        return list(zip(*(cut(one, count) for one in batch), strict=True))
    return [batch] * count


def taken(batch: Any, rows: Sequence[int]) -> Any:
    """The samples ``rows`` of a batch."""
    if isinstance(batch, Tensor):
        return batch[list(rows)]
    if isinstance(batch, Mapping):
        return {key: taken(value, rows) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(taken(one, rows) for one in batch)
    return batch


def difference(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> float:
    """The largest difference between two states, by norm, relative to what training has changed.

    It is infinite if names differ. A parameter that moves a millionth as far as the farthest, or
    less, is compared with that: where the exact gradient is zero, as of an attention's key bias,
    rounding is all that there is.
    """
    if found.keys() != expected.keys():
        return float("inf")
    moved = {name: _distance(one, before[name]) for name, one in expected.items()}
    least = 1e-6 * max(moved.values())
    apart = {name: _distance(one, found[name]) for name, one in expected.items()}
    return max(apart[name] / max(far, least) for name, far in moved.items())


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm())
