"""A second capture of a model, with all modules in evaluation mode."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.executor.capture.exported.exporting import Example
from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.capture.python_state import snapshot
from stagewright.executor.capture.tracing import capture
from stagewright.executor.capture.twins import copied, twin
from stagewright.graphs.documents.errors import InputError


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules compute in evaluation mode; afterwards each module's mode is restored."""
    modes = {part: part.training for module in modules for part in module.modules()}
    for part in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def with_evaluation(
    model: nn.Module | Sequence[nn.Module],
    layered: LayeredModel,
    example: Example | None,
    like: LayeredModel | None = None,
) -> LayeredModel:
    """``layered``, captured of ``model`` with ``example``, and the same in evaluation.

    ``like`` as in `capture`.

    Raises InputError if the model cannot be captured in evaluation, has other layers there, or
    needs more for it than modes.
    """
    modules = [model] if isinstance(model, nn.Module) else model
    for module in modules:
        _require_plain_modes(module)
    with evaluating(modules):
        found = capture(model, example, None if like is None else like.evaluation)
    layered.require_same_layers(found, "in evaluation")
    again = found.again

    def again_in_evaluation(shapes: Sequence[tuple[int, ...]]) -> LayeredModel:
        assert again is not None
        with evaluating(modules):
            return again(shapes)

    if again is not None:
        found = replace(found, again=again_in_evaluation)
    return replace(layered, evaluation=found)


class _Computing(TorchDispatchMode):
    """Notes whether anything is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.found = True
        return func(*args, **(kwargs or {}))


def _require_plain_modes(model: nn.Module) -> None:
    """Refuse a method ``train`` that does more than to set modes, on a copy without data.

    It is not called later: layers are evaluated by their modes alone.
    """
    own = [part for part in model.modules() if type(part).train is not nn.Module.train]
    if not own:
        return
    memo = {
        id(one): twin(one, torch.empty_like(one, device="meta"))
        for one in [*model.parameters(), *model.buffers()]
    }
    trial = copied(model, memo)
    before = snapshot(trial)
    with _Computing() as computing:
        trial.eval()
    changed = {name for _, name in before.changed(snapshot(trial))} - {"training"}
    training = any(part.training for part in trial.modules())
    if not (changed or training or computing.found):
        return
    what = (
        f"changes {min(changed)!r}"
        if changed
        else "computes"
        if computing.found
        else "leaves a module in training"
    )
    names = ", ".join(sorted({type(part).__name__ for part in own}))
    raise InputError(
        f"the method train of {names} {what}: an evaluation sets modes alone; decide by "
        "self.training, or evaluate the whole model by parameters_on_first_rank()"
    )
