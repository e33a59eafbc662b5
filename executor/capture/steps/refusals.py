"""What cannot be captured, in one line with the line of the user's code."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from stagewright.executor.capture.steps.lines import line_of
from stagewright.graphs.documents.errors import InputError

REASONS: tuple[tuple[type[Exception], str], ...] = (
    (
        DataDependentOutputException,
        "reads a value of a tensor ({}), but a graph has one path for all values",
    ),
    (
        DynamicOutputShapeException,
        "makes a tensor whose shape depends on values ({}), but a graph has fixed shapes",
    ),
)

ATTRIBUTE = "changes a tensor that is neither a parameter nor a buffer; register it as a buffer"
TEXTS = {
    "Unexpected fake buffer": ATTRIBUTE,
    "expected to have an entirely functional graph": ATTRIBUTE,
}
"""Parts of torch's messages, which say it in terms of its own graphs."""


@contextmanager
def refusing(model: nn.Module) -> Iterator[None]:
    """Turn what tracing raises into an InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the user's code may raise anything when it is traced
        place = line_of(error.__traceback__) or type(model).__name__
        raise InputError(f"{place}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    for kind, reason in REASONS:
        if isinstance(error, kind):
            return reason.format(" ".join(str(error.args[0]).split()))
    for text, reason in TEXTS.items():
        if text in str(error):
            return reason
    first = str(error).strip().partition("\n")[0]
    return f"the step cannot be traced: {type(error).__name__}: {first}"
