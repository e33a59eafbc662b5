"""Two steps of a captured model beside the model's own: what capture changed is refused.

The model is to compute the same twice. The captured layers are computed as in a plan of a stage for
each: a layer takes leaves, which are contiguous, as a rank receives them. The second step has other
samples and comes after the first, so that what one forward keeps for the next is seen.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.executor.capture.exported.exporting import loss_of
from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.capture.signature import Signature, taken_apart
from stagewright.executor.training.data.batches import mapped_batch
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
    """The loss, gradients and new buffers by name, and sizes of all modules' results in order."""

    loss: float
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    results: list[tuple[str, float]]


def require_same_step(plain: nn.Module, captured: LayeredModel, step: ExampleStep) -> None:
    """Refuse a captured model whose losses or gradients are not those of the model itself.

    ``plain`` has the same parameters and modes as ``captured``, which is of another copy; both may
    draw random numbers.

    Raises
    ------
    InputError
        Naming the first layer that differs.
    """
    name = type(plain).__name__
    modules = [layer.module for layer in captured.layers]
    share = TOLERANCES.get(step.autocast or _dtype(plain), 1e-4)
    before = _buffers(plain)
    once = _seen(_model_step(plain, step), [plain], step)
    after = _buffers(plain)
    _set_buffers(plain, before)
    if _difference(once, _seen(_model_step(plain, step), [plain], step, once.gradients), share):
        raise InputError(
            f"{name} computes something else the second time, of the same samples and buffers: it "
            "depends on a counter, a clock, its gradients, or numbers that torch does not draw; "
            "keep its state in buffers, or trust the capture with --no-self-check"
        )
    _set_buffers(plain, after)
    for one in (step, _other_samples(step)):
        expected = once if one is step else _seen(_model_step(plain, one), [plain], one)
        found = _seen(_layers_step(captured, one), modules, one)
        if what := _difference(expected, found, share):
            raise InputError(
                f"the captured model is not {name}: {what}{_first(expected, found, share)}; its "
                "forward asks for what is different while it is captured: put that into a block, "
                "pass a list of modules, or trust the capture with --no-self-check"
            )


def _other_samples(step: ExampleStep) -> ExampleStep:
    """The same samples in another order, as a part of a larger mini-batch."""

    def turned(one: Tensor) -> Tensor:
        return torch.cat([one, one.roll(1, 0)])[len(one) :] if one.dim() else one

    return replace(
        step,
        inputs=tuple(map(turned, step.inputs)),
        targets=mapped_batch(step.targets, turned),
    )


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in module.named_buffers()}


def _set_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, one in module.named_buffers():
            if name in values:
                one.copy_(values[name])


Compute = Callable[[], float]


def _model_step(model: nn.Module, step: ExampleStep) -> Compute:
    """The forward and backward of the model as its author calls it; gives the loss."""
    arguments, keywords = step.signature.arguments(step.inputs)

    def compute() -> float:
        with _cast(step):
            result = model(*arguments, **keywords)
            output = loss_of(result, type(model).__name__) if step.takes_loss else result
            loss = step.loss(output, step.targets)
        return _backward(loss)

    return compute


def _layers_step(captured: LayeredModel, step: ExampleStep) -> Compute:
    """The same, layer by layer: each from leaves, and with a backward of its own."""

    def compute() -> float:
        runs: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        values = _leaves(step.inputs)
        with _cast(step):
            for layer in captured.layers:
                try:
                    outputs = layer.module(*values)
                except RuntimeError as error:  # such as a change of a leaf in place
                    raise InputError(
                        f"layer {layer.name!r} fails as the first of a stage: {error}"
                    ) from error
                runs.append((values, outputs))
                values = _leaves(outputs)
            loss = step.loss(captured.result(values), step.targets)
        mean = _backward(loss)
        for taken, outputs in reversed(runs):
            pairs = [
                (one, leaf.grad)
                for one, leaf in zip(outputs, values, strict=True)
                if leaf.grad is not None
            ]
            torch.autograd.backward([one for one, _ in pairs], [other for _, other in pairs])
            values = taken
        return mean

    return compute


def _leaves(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(one.detach().contiguous().requires_grad_(one.requires_grad) for one in values)


def _cast(step: ExampleStep) -> torch.autocast:
    device = step.inputs[0].device.type
    return torch.autocast(device, step.autocast, enabled=step.autocast is not None)


def _backward(result: Any) -> float:
    """The mean loss, of which the gradients of the sum are added."""
    total, count = read_loss(result)
    total.backward()
    return float((total if count is None else total / count).detach())


def _seen(
    compute: Compute,
    modules: Sequence[nn.Module],
    step: ExampleStep,
    earlier: Mapping[str, Tensor | None] = MappingProxyType({}),
) -> _Seen:
    """What ``compute`` gives, where the parameters already have the gradients ``earlier``."""
    device = step.inputs[0].device
    parameters = {
        name: one
        for module in modules
        for name, one in module.named_parameters(remove_duplicate=False)
    }
    for name, value in earlier.items():
        parameters[name].grad = None if value is None else value.clone()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(SEED)
        with _watched(modules) as results:
            loss = compute()
    gradients = {}
    for name, one in parameters.items():
        known = earlier.get(name)
        gradients[name] = one.grad if one.grad is None or known is None else one.grad - known
    for one in parameters.values():
        one.grad = None
    buffers = {name: one for module in modules for name, one in _buffers(module).items()}
    return _Seen(loss, gradients, buffers, results)


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
    for name in expected.buffers.keys() & found.buffers.keys():
        one, other = expected.buffers[name].double(), found.buffers[name].double()
        if float((one - other).norm()) > 10 * share * float(one.norm()):
            return f"the buffer {name!r} becomes another"
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
