"""Mini-batches of a user: tensors, tuples or keywords of them, samples first."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stagewright.executor.capture.signature import Signature, signed, taken_apart
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError

Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]


def tensors_of_batch(name: str, batch: Batch) -> tuple[Tensor, ...]:
    """The tensors of a mini-batch; ``name`` is that of the argument in messages."""
    if isinstance(batch, Mapping):
        batch = dict(batch)
    elif not isinstance(batch, tuple | Tensor):
        raise InputError(
            f"{name} must be a tensor, a tuple or a dict of tensors, got {type(batch).__name__}"
        )
    return taken_apart(batch)[0]


def typed_inputs(batch: Batch, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Signature]:
    """The input tensors of a mini-batch, floats cast to one type, and their signature."""
    tensors, signature = signed(batch)
    typed = tuple(one.to(dtype) if one.is_floating_point() else one for one in tensors)
    return typed, signature


def require_as_many(inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Refuse inputs and targets of different numbers of samples."""
    for one in (*inputs, *targets):
        if one.dim() == 0 or len(one) != len(inputs[0]):
            raise InputError(
                f"a mini-batch needs as many samples in all its inputs and targets, got shapes "
                f"{', '.join(str(tuple(each.shape)) for each in (*inputs, *targets))}"
            )


def require_samples(inputs: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Refuse microbatches of ``sizes`` where a mini-batch has fewer samples."""
    samples = min(len(one) for one in inputs)
    if max(sizes) > samples:
        raise InputError(
            f"a microbatch of {max(sizes)} samples is asked for, the data's first mini-batch has "
            f"{samples}"
        )


def microbatch_samples(plan: PipelinePlan, inputs: Sequence[Tensor], replicas: int = 1) -> int:
    """The samples of a microbatch, from ``inputs`` of one of ``replicas`` replicas."""
    count = len(inputs[0]) * replicas
    if count == 0 or count % plan.microbatches:
        raise InputError(
            f"a mini-batch of {count} samples cannot be cut into {plan.microbatches} equal "
            "microbatches; leave a ragged last mini-batch out, or pad it"
        )
    return count // plan.microbatches


def mapped_batch(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Apply ``change`` to each tensor."""
    given = dict(batch) if isinstance(batch, Mapping) else batch
    changed: Batch = pytree.tree_map_only(Tensor, change, given)
    return changed


def on_meta(batch: Any) -> Any:
    """The same without the values of its tensors."""
    return pytree.tree_map_only(Tensor, lambda one: torch.empty_like(one, device="meta"), batch)
