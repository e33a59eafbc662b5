"""A captured model as it is in evaluation."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from stagewright.executor.capture.exported.exporting import Example
from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.capture.tracing import capture


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules compute as in evaluation; afterwards each has its own mode again.

    Their method ``train`` is not called: some models change their weights in it.
    """
    modes = {part: part.training for module in modules for part in module.modules()}
    for part in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def with_evaluation(
    model: nn.Module | Sequence[nn.Module], layered: LayeredModel, example: Example | None
) -> LayeredModel:
    """``layered``, captured of ``model`` with ``example``, and the same in evaluation.

    Raises
    ------
    InputError
        If the model cannot be captured in evaluation, or has other layers there.
    """
    modules = [model] if isinstance(model, nn.Module) else model
    with evaluating(modules):
        found = capture(model, example)
    layered.require_same_layers(found, "in evaluation")
    again = found.again

    def again_in_evaluation(shapes: Sequence[tuple[int, ...]]) -> LayeredModel:
        assert again is not None
        with evaluating(modules):
            return again(shapes)

    if again is not None:
        found = replace(found, again=again_in_evaluation)
    return replace(layered, evaluation=found)
