"""Refusals of models that cannot be captured, in one line with the line of the user's code."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from stagewright.executor.capture.draws import storage_of
from stagewright.executor.capture.places import line_of
from stagewright.executor.capture.plain_modules import require_plain_tensors
from stagewright.graphs.documents.errors import InputError

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (
        DataDependentOutputException,
        "reads a value of a tensor ({}), but a graph has one path for all values",
    ),
    (
        DynamicOutputShapeException,
        "makes a tensor whose shape depends on values ({}), but a graph has fixed shapes",
    ),
)

_ATTRIBUTE = "changes a tensor that is neither a parameter nor a buffer; register it as a buffer"
TEXTS = {
    "Unexpected fake buffer": _ATTRIBUTE,
    "expected to have an entirely functional graph": _ATTRIBUTE,
}
"""Parts of torch's messages, which say it in terms of its own graphs."""


@contextmanager
def refusing(model: nn.Module) -> Iterator[None]:
    """Turn an exception that tracing raises into an InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the user's code may raise anything when it is traced
        place = line_of(error.__traceback__) or type(model).__name__
        raise InputError(f"{place}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return reason.format(" ".join(str(error.args[0]).split()))
    for text, reason in TEXTS.items():
        if text in str(error):
            return reason
    first = str(error).strip().partition("\n")[0]
    return f"the step cannot be traced: {type(error).__name__}: {first}"


def require_separate_tensors(model: nn.Module) -> None:
    """Refuse hooks of parameters, which a graph has not, and tensors that share memory.

    A tensor under two names is one state; two tensors in the same memory would be two.
    """
    require_plain_tensors(model)
    for name, one in model.named_parameters():
        if one._backward_hooks:
            raise InputError(f"parameter {name!r} has a hook on its gradient; remove the hook")
    named = [*model.named_parameters(), *model.named_buffers()]
    spans = sorted((storage_of(one), *_span(one), name) for name, one in named if one.numel())
    for (storage, _, end, name), (other, start, _, later) in pairwise(spans):
        if storage == other and start < end:
            raise InputError(
                f"{name!r} and {later!r} share memory but are different tensors: make one of them "
                "a name of the other, or a copy"
            )


def _span(tensor: Tensor) -> tuple[int, int]:
    """First and last byte in the storage."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    start = int(tensor.storage_offset())
    end = start + sum((int(size) - 1) * int(stride) for size, stride in sizes) + 1
    return start * tensor.itemsize, end * tensor.itemsize


def require_dense(gradients: Mapping[str, fx.Node]) -> None:
    """Refuse sparse gradients, which an optimizer applies in another way."""
    for path, node in gradients.items():
        if node.meta["val"].layout != torch.strided:
            raise InputError(f"the gradient of {path!r} is sparse; make it with sparse=False")
