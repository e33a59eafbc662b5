"""The parts of an operator that is divided, on real tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten


def cut(value: Tensor, axis: int | None, parts: int) -> list[Tensor]:
    """The pieces of an input; an input that is not cut goes whole to every part."""
    return [value] * parts if axis is None else list(value.tensor_split(parts, axis))


def run_part(node: fx.Node, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The outputs of the operator on ``inputs``, in the order of its tensor arguments."""
    left = iter(inputs)
    args: Any
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: next(left))
    if node.target is aten.convolution_backward.default and args[3] is not None:
        args = (*args[:3], [args[0].shape[1]], *args[4:])  # the bias has as many as the output
    target: Any = node.target
    result = target(*args, **kwargs)
    return list(result) if isinstance(result, list | tuple) else [result]


def joined(
    node: fx.Node, number: int, pieces: Sequence[Tensor | None], axis: int | None
) -> Tensor | None:
    """An output of the whole operator: its parts concatenated, or added.

    It has the strides that the operator gives it, since views of it may need them.
    """
    present = [one for one in pieces if one is not None]
    if len(present) < len(pieces):
        return None
    found = torch.stack(present).sum(0) if axis is None else torch.cat(present, axis)
    strides = captured_outputs(node)[number].stride()
    if found.stride() == strides:
        return found
    return found.new_empty_strided(found.shape, strides).copy_(found)


def captured_outputs(node: fx.Node) -> list[Any]:
    """The outputs of a captured operator without values."""
    value = node.meta["val"]
    return list(value) if isinstance(value, list | tuple) else [value]
