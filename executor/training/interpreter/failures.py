"""Errors of a training step."""

import torch

from stagewright.executor.programs.program import (
    Instruction,
)


class NonFiniteLoss(ArithmeticError):  # noqa: N818 - named as InvalidPlan is
    """The loss of a microbatch is nan or infinite, or that of a mini-batch has a count of 0."""


class OutOfMemory(RuntimeError):  # noqa: N818 - named as InvalidPlan is
    """A stage does not fit into its device's memory."""


def explain_memory(error: RuntimeError | MemoryError, one: Instruction, step: int) -> None:
    """Raise OutOfMemory for an error that means a lack of memory."""
    if is_lack_of_memory(error):
        reason = str(error).partition("\n")[0]
        raise OutOfMemory(
            f"stage {one.action.stage} does not fit: {one} ran out of memory in step {step + 1}: "
            f"{reason}"
        ) from error


def is_lack_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether an error means that memory could not be allocated."""
    short = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return short or "can't allocate memory" in str(error)
