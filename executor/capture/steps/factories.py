"""A factory's model and mini-batch for a capture, without memory where that is possible."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from stagewright.graphs.documents.errors import InputError


def without_values(
    make: Callable[[], nn.Module], batch: tuple[Any, Any]
) -> tuple[nn.Module, tuple[Any, Any]]:
    """The model of a factory with fake parameters, and the mini-batch with fake tensors.

    A factory that reads values while it makes the model is called for a real one.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = tree_map_only(Tensor, mode.from_tensor, batch)
    try:
        with mode:
            return make(), fakes
    except Exception:  # whatever the factory's code raises on a tensor without values
        return make(), batch


def resized(batch: tuple[Any, Any], samples: int) -> tuple[Any, Any]:
    """A mini-batch of ``samples`` samples: the given samples, repeated.

    Raises InputError if the tensors of the batch have no samples, or different numbers of them.
    """
    tensors = tree_leaves(batch)
    if not all(isinstance(one, Tensor) and one.dim() for one in tensors):
        raise InputError("a mini-batch has something other than tensors with samples in axis 0")
    counts = {len(one) for one in tensors}
    if len(counts) != 1 or 0 in counts:
        raise InputError(f"the tensors of a mini-batch have {sorted(counts)} samples")
    rows = torch.arange(samples) % counts.pop()
    found: tuple[Any, Any] = tree_map_only(Tensor, lambda one: one[rows], batch)
    return found


def share_of(batch: tuple[Any, Any], replicas: int, number: int) -> tuple[Any, Any]:
    """The samples of replica ``number`` in a mini-batch.

    Raises InputError if a tensor's samples cannot be divided among the replicas.
    """
    if replicas == 1:
        return batch
    for one in tree_leaves(batch):
        if not isinstance(one, Tensor) or not one.dim() or len(one) % replicas:
            found = len(one) if isinstance(one, Tensor) and one.dim() else 0
            below = found - found % replicas
            near = f"{below} or {below + replicas}" if below else str(replicas)
            raise InputError(
                f"a tensor of the mini-batch has {found or 'no'} samples, which {replicas} "
                f"replicas or microbatches cannot share equally; {near} can be"
            )

    def rows(one: Tensor) -> Tensor:
        size = len(one) // replicas
        return one[number * size : (number + 1) * size]

    found_share: tuple[Any, Any] = tree_map_only(Tensor, rows, batch)
    return found_share
