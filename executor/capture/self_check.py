"""One step of a captured model beside one of the model itself: what capture changed is refused."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.executor.capture.exported.exporting import loss_of
from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.capture.signature import Signature, taken_apart
from stagewright.executor.training.losses import Loss, read_loss
from stagewright.graphs.documents.errors import InputError

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""How far two runs of the same operators may be apart, as a share, by the type of computations."""
SEED = 0


@dataclass(frozen=True, slots=True)
class ExampleStep:
    """A microbatch, and how a model takes it.

    ``inputs`` are its tensors, in the order of ``signature``. With ``takes_loss`` the model's
    result has the loss. ``autocast`` is the type of its computations, None for the parameters'.
    """

    inputs: tuple[Tensor, ...]
    targets: Any
    signature: Signature
    takes_loss: bool
    loss: Loss
    autocast: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """The loss, the gradients by name, and the size of every module's result in order of calls."""

    loss: float
    gradients: dict[str, Tensor | None]
    results: list[tuple[str, float]]


def require_same_step(plain: nn.Module, captured: LayeredModel, step: ExampleStep) -> None:
    """Refuse a captured model whose loss or gradients are not those of the model itself.

    ``plain`` has the same parameters and modes as ``captured``, which is of another copy; both may
    draw random numbers.

    Raises
    ------
    InputError
        Naming the first layer that differs.
    """
    arguments, keywords = step.signature.arguments(step.inputs)

    def of_model() -> Any:
        result = plain(*arguments, **keywords)
        return loss_of(result, type(plain).__name__) if step.takes_loss else result

    def of_layers() -> Any:
        values = step.inputs
        for layer in captured.layers:
            values = layer.module(*values)
        return captured.result(values)

    expected = _seen(of_model, [plain], step)
    found = _seen(of_layers, [layer.module for layer in captured.layers], step)
    share = TOLERANCES.get(step.autocast or _dtype(plain), 1e-4)
    what = _difference(expected, found, share)
    if what is None:
        return
    again = _seen(of_model, [plain], step)
    if _difference(expected, again, share) is not None:  # the model is not the same twice
        return
    raise InputError(
        f"the captured model is not {type(plain).__name__}: {what}"
        f"{_first(expected, found, share)}; its forward asks for what is different while it is "
        "captured: put that into a block, pass a list of modules, or trust the capture with "
        "--no-self-check"
    )


def _seen(compute: Callable[[], Any], modules: Sequence[nn.Module], step: ExampleStep) -> _Seen:
    device = step.inputs[0].device
    parameters = {
        name: one
        for module in modules
        for name, one in module.named_parameters(remove_duplicate=False)
    }
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(SEED)
        with _watched(modules) as results:
            with torch.autocast(device.type, step.autocast, enabled=step.autocast is not None):
                total, count = read_loss(step.loss(compute(), step.targets))
            wanted = {id(one): one for one in parameters.values() if one.requires_grad}
            made = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    of = dict(zip(wanted, made, strict=True))
    gradients = {name: of.get(id(one)) for name, one in parameters.items()}
    mean = total if count is None else total / count
    return _Seen(float(mean.detach()), gradients, results)


@contextmanager
def _watched(modules: Sequence[nn.Module]) -> Iterator[list[tuple[str, float]]]:
    """The sizes of what every named module returns, in the order of the calls."""
    results: list[tuple[str, float]] = []
    handles = []
    for module in modules:
        for name, part in module.named_modules():
            if name:

                def note(_: nn.Module, __: Any, result: Any, name: str = name) -> None:
                    tensors, _structure = taken_apart(result)
                    size = sum(float(one.detach().abs().double().sum()) for one in tensors)
                    results.append((name, size))

                handles.append(part.register_forward_hook(note))
    try:
        yield results
    finally:
        for one in handles:
            one.remove()


def _difference(expected: _Seen, found: _Seen, share: float) -> str | None:
    if abs(found.loss - expected.loss) > share * max(abs(expected.loss), share):
        return f"its loss is {found.loss:g}, not {expected.loss:g}"
    norms = [float(one.norm()) for one in expected.gradients.values() if one is not None]
    least = share * max(norms, default=0.0)
    none = torch.zeros(())
    for name, gradient in expected.gradients.items():
        one, other = (none if g is None else g for g in (gradient, found.gradients.get(name)))
        if float((one - other).norm()) > max(least, 10 * share * float(one.norm())):
            return f"the gradient of {name!r} is another"
    return None


def _first(expected: _Seen, found: _Seen, share: float) -> str:
    """The first module of both whose result differs, in words."""
    left: dict[str, list[float]] = {}
    for name, size in found.results:
        left.setdefault(name, []).append(size)
    for name, size in expected.results:
        sizes = left.get(name)
        if sizes and abs(sizes.pop(0) - size) > share * abs(size):
            return f", and the first layer that differs is {name!r}"
    return ""


def _dtype(module: nn.Module) -> torch.dtype:
    return next(
        (one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32
    )
