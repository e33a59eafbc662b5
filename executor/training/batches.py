"""Mini-batches of a user: tensors or tuples of tensors, samples first."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError

Batch = Tensor | tuple[Tensor, ...]


def tensors_of_batch(name: str, batch: Batch) -> tuple[Tensor, ...]:
    """The tensors of a mini-batch; ``name`` is that of the argument in messages."""
    found = batch if isinstance(batch, tuple) else (batch,)
    for one in found:
        if not isinstance(one, Tensor):
            raise InputError(
                f"{name} must be a tensor or a tuple of tensors, got {type(one).__name__}"
            )
    return found


def typed_inputs(batch: Batch, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The inputs of a mini-batch, with floating-point numbers of a type."""
    every = tensors_of_batch("inputs", batch)
    return tuple(one.to(dtype) if one.is_floating_point() else one for one in every)


def require_as_many(inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Refuse inputs and targets of different numbers of samples."""
    for one in (*inputs, *targets):
        if one.dim() == 0 or len(one) != len(inputs[0]):
            raise InputError(
                f"a mini-batch needs as many samples in all its inputs and targets, got shapes "
                f"{', '.join(str(tuple(each.shape)) for each in (*inputs, *targets))}"
            )


def microbatch_samples(plan: PipelinePlan, inputs: Sequence[Tensor]) -> int:
    """The samples of a microbatch."""
    count = len(inputs[0])
    if count == 0 or count % plan.microbatches:
        raise InputError(
            f"a mini-batch of {count} samples cannot be cut into {plan.microbatches} equal "
            "microbatches; leave a ragged last mini-batch out, or pad it"
        )
    return count // plan.microbatches


def mapped_batch(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Apply ``change`` to each tensor."""
    return tuple(map(change, batch)) if isinstance(batch, tuple) else change(batch)
