"""The values between layers: shapes, types, and which get a gradient; on fake tensors.

Modules whose path depends on values, or whose kernels have no rule for shapes, are given values.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.func import functional_call
from torch.nn.utils.stateless import _reparametrize_module

from stagewright.executor.capture.draws import Draw, Record, SavedStorages
from stagewright.executor.capture.layers import CapturedLayer
from stagewright.executor.capture.places import place_of
from stagewright.executor.capture.python_state import attributes_kept, require_stateless, snapshot
from stagewright.graphs.documents.errors import InputError

SCALE = 0.02  # of random numbers, as of common initialisations
Sizes = Callable[[Any], int]
_T = TypeVar("_T")


def in_example(size: Any) -> int:
    """A size that may vary, in the example; 0 if it depends on values."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.has_hint() else 0


def elsewhere(given: Iterable[Any]) -> Sizes:
    """Distinct sizes, larger than the example's, for the ``given`` sizes that vary."""
    varying = [size.node for size in given if isinstance(size, torch.SymInt)]
    symbols = sorted({one for node in varying for one in node.expr.free_symbols}, key=str)
    least = 1 + max((in_example(torch.SymInt(node)) for node in varying), default=0)
    other = {symbol: least + place for place, symbol in enumerate(symbols)}

    def sized(size: Any) -> int:
        return int(size.node.expr.subs(other) if isinstance(size, torch.SymInt) else size)

    return sized


@contextmanager
def with_values(module: nn.Module) -> Iterator[None]:
    """While the body runs, ``module`` has parameters and buffers with values; none is fake.

    Of one module at a time, so that a model need not fit into memory.
    """
    with unset_fake_temporarily():
        every: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        every |= module.named_buffers(remove_duplicate=False)
        with _reparametrize_module(module, valued_all(every), tie_weights=False):
            yield


def valued_all(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with values in place of a module's tensors; a shared tensor stays shared."""
    made = {id(one): _like(one) for one in state.values()}
    return {name: made[id(one)] for name, one in state.items()}


def valued(one: Tensor, sizes: Sizes = in_example) -> Tensor:
    """A tensor with values of the shape, type and device of ``one``: random, zero or true.

    ``sizes`` tells what its varying sizes are.
    """
    shape, device = tuple(map(sizes, one.shape)), one.device
    if device.type == "meta":
        device = torch.device("cpu")
    if one.is_floating_point() or one.is_complex():
        generator = torch.Generator(device).manual_seed(0)
        made = torch.empty(shape, dtype=one.dtype, device=device)
        return made.normal_(0.0, SCALE, generator=generator)
    fill = torch.ones if one.dtype == torch.bool else torch.zeros
    return fill(shape, dtype=one.dtype, device=device)


def _like(one: Tensor) -> Tensor:
    made = valued(one).requires_grad_(one.requires_grad)
    return nn.Parameter(made, one.requires_grad) if isinstance(one, nn.Parameter) else made


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that passes from layer to layer; ``gradient`` says whether one comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool

    @property
    def bytes(self) -> int:
        """The tensor's size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """A layer's outputs, its parameters that get a gradient, and its random draws.

    ``changes`` says whether it changes one of its buffers. ``saved_bytes`` is what autograd keeps
    of the layer's own values: neither its inputs nor its parameters. ``draws`` are those of
    its forward; ``draws_again`` says whether its backward draws too.
    """

    outputs: tuple[Value, ...]
    trained: frozenset[str]
    draws: tuple[Draw, ...]
    draws_again: bool
    changes: bool
    saved_bytes: int

    @property
    def random(self) -> bool:
        """Whether the layer draws random numbers."""
        return bool(self.draws)


def values_of(inputs: Sequence[Tensor], samples: int) -> tuple[Value, ...]:
    """The model's inputs, cut to ``samples``."""
    return tuple(Value((samples, *one.shape[1:]), one.dtype, gradient=False) for one in inputs)


def propagate(
    layers: Sequence[CapturedLayer],
    inputs: Sequence[Value],
    device: torch.device,
    autocast: torch.dtype | None,
) -> tuple[LayerTrace, ...]:
    """Run every layer forward and backward on tensors without data.

    Raises InputError naming the layer that does not accept the outputs of the one before it, or
    whose behaviour would change in a pipeline: it keeps Python state, or changes buffers in its
    backward.
    """
    return _without_data(
        layers, device, None, lambda: _there_and_back(layers, inputs, device, autocast)
    )


def require_tensors(
    layers: Sequence[CapturedLayer],
    inputs: Sequence[Value],
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    """Refuse layers, with parameters of ``dtype``, that hand on something else than tensors."""

    def forward() -> None:
        values = tuple(_fake(one, device) for one in inputs)
        for layer in layers:
            try:
                values = layer.module(*values)
            except Exception:  # of the layer's code: left to `propagate`
                return
            other = [type(one).__name__ for one in values if not isinstance(one, Tensor)]
            if other:
                raise InputError(f"layer {layer.name!r} hands on a {other[0]}")

    with torch.no_grad():
        _without_data(layers, device, dtype, forward)


def _without_data(
    layers: Sequence[CapturedLayer],
    device: torch.device,
    dtype: torch.dtype | None,
    work: Callable[[], _T],
) -> _T:
    """The result of ``work``, during which the tensors of ``layers`` have no data."""
    chain = nn.ModuleList(layer.module for layer in layers)
    # A tensor that a module keeps without registering it is not a fake one.
    with (
        _quiet(),
        attributes_kept(chain),
        torch.compiler.set_stance("force_eager"),  # compiled kernels read the data
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        state = {f"chain.{name}": one for name, one in _fakes(chain, device, dtype).items()}
        found: _T = functional_call(_Inside(chain, work), state, (), tie_weights=False)
    return found


class _Inside(nn.Module):
    """Does ``work`` while the tensors of ``chain`` are replaced: a backward may read them again."""

    def __init__(self, chain: nn.Module, work: Callable[[], Any]) -> None:
        super().__init__()
        self.chain, self.work = chain, work

    def forward(self) -> Any:
        return self.work()


def _fakes(chain: nn.Module, device: torch.device, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """A tensor without data, of ``dtype`` if it is given, for every parameter and buffer."""
    made: dict[int, Tensor] = {}
    found = {}
    for path, module in chain.named_modules():
        for registered in (module._parameters, module._buffers):
            for name, one in registered.items():
                if one is not None:
                    kind = dtype if dtype and one.is_floating_point() else one.dtype
                    value = Value(tuple(one.shape), kind, one.requires_grad)
                    found[f"{path}.{name}"] = made.setdefault(id(one), _fake(value, device))
    return found


def _there_and_back(
    layers: Sequence[CapturedLayer],
    inputs: Sequence[Value],
    device: torch.device,
    autocast: torch.dtype | None,
) -> tuple[LayerTrace, ...]:
    runs: list[_LayerRun] = []
    values = tuple(_fake(one, device) for one in inputs)
    for layer in layers:
        with _named(layer, values):
            runs.append(_run_or_whole(layer, values, device, autocast))
        values = runs[-1].outputs
    if not any(one.requires_grad for one in values):
        raise InputError("no output of the model depends on a parameter that is trained")
    gradients = [torch.empty_like(one) if one.requires_grad else None for one in values]
    again = []
    for layer, run in zip(reversed(layers), reversed(runs), strict=True):
        with _named(layer, run.leaves):
            back = run.draws_again
            again.append(_run_back(layer, run, gradients) if back is None else back)
        gradients = [leaf.grad for leaf in run.leaves]
    return tuple(
        LayerTrace(
            tuple(Value(tuple(one.shape), one.dtype, one.requires_grad) for one in run.outputs),
            frozenset(name for name, one in run.parameters.items() if one.grad is not None),
            run.draws,
            draws_again,
            run.changes,
            run.saved_bytes,
        )
        for run, draws_again in zip(runs, reversed(again), strict=True)
    )


@contextmanager
def _named(layer: CapturedLayer, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Name the layer in errors of its code."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the layer's own code raises anything
        shapes = ", ".join(
            str(tuple(one.shape)) if isinstance(one, Tensor) else f"({type(one).__name__})"
            for one in inputs
        )
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"layer {layer.name!r} fails on inputs of shape {shapes}{place_of(error)}: "
            f"{type(error).__name__}: {reason}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing a traceback of an error that is reported in one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@dataclass(frozen=True, slots=True)
class _LayerRun:
    """The tensors of a layer's forward; all are fake.

    ``draws_again``: whether its backward draws, if that was run with the forward.
    """

    leaves: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameters: dict[str, Tensor]
    draws: tuple[Draw, ...]
    changes: bool
    saved_bytes: int
    draws_again: bool | None = None


def _run_or_whole(
    layer: CapturedLayer,
    inputs: Sequence[Tensor],
    device: torch.device,
    autocast: torch.dtype | None,
) -> _LayerRun:
    """A layer's forward; if it needs values, on tensors with values and with its backward."""
    try:
        return _run(layer, inputs, device, autocast)
    except InputError:
        raise
    except Exception:  # of the layer's code, of any kind
        with with_values(layer.module):
            given = [valued(one).requires_grad_(one.requires_grad) for one in inputs]
            run = _run(layer, given, device, autocast)
            gradients = [torch.ones_like(one) if one.requires_grad else None for one in run.outputs]
            draws_again = _run_back(layer, run, gradients)
    return replace(
        run,
        leaves=tuple(map(_outline, run.leaves)),
        outputs=tuple(map(_outline, run.outputs)),
        parameters={name: _outline(one, trained=True) for name, one in run.parameters.items()},
        draws_again=draws_again,
    )


def _outline(one: Tensor, trained: bool = False) -> Tensor:
    """A tensor without data like ``one``, which requires or has a gradient if ``one`` does.

    A parameter that is ``trained`` has one: other values may use it, as of an expert.
    """
    made = _fake(Value(tuple(one.shape), one.dtype, one.requires_grad), one.device)
    if trained or (one.is_leaf and one.grad is not None):
        made.grad = torch.empty_like(made)
    return made


def _run(
    layer: CapturedLayer,
    inputs: Sequence[Tensor],
    device: torch.device,
    autocast: torch.dtype | None,
) -> _LayerRun:
    module = layer.module
    leaves = tuple(one.detach().requires_grad_(one.requires_grad) for one in inputs)
    buffers, parameters = _versions(module), dict(module.named_parameters())
    before = snapshot(module)

    def forward() -> tuple[tuple[Tensor, ...], Record, SavedStorages]:
        arguments = tuple(one.clone() for one in leaves)
        kept = SavedStorages([*parameters.values(), *module.buffers(), *arguments])
        with (
            torch.autocast(device.type, autocast, enabled=autocast is not None),
            torch.autograd.graph.saved_tensors_hooks(kept.add, lambda saved: saved),
            Record() as record,
        ):
            outputs = tuple(module(*arguments))
        if any(one._version for one in arguments):
            raise ValueError(
                "it changes an input in place, which other layers or a second forward use"
            )
        return outputs, record, kept

    outputs, record, kept = forward()
    changes = _versions(module) != buffers
    require_stateless(layer.name, module, before, record, lambda: forward()[1])
    return _LayerRun(
        leaves,
        outputs,
        {name: one for name, one in parameters.items() if one.requires_grad},
        tuple(record.draws),
        changes,
        sum(kept.sizes.values()),
    )


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensor every buffer is, and how often it has changed."""
    return {name: (id(one), one._version) for name, one in module.named_buffers()}


def _run_back(layer: CapturedLayer, run: _LayerRun, gradients: Sequence[Tensor | None]) -> bool:
    """Run a layer's backward into parameters and leaves; return whether the backward draws."""
    pairs = [
        (one, gradient)
        for one, gradient in zip(run.outputs, gradients, strict=True)
        if one.requires_grad and gradient is not None
    ]
    buffers = _versions(layer.module)
    with Record() as record:
        torch.autograd.backward([one for one, _ in pairs], [one for _, one in pairs])
    if _versions(layer.module) != buffers:
        raise InputError(
            f"layer {layer.name!r} changes its buffers in its backward, by a forward that it "
            "computes again; leave torch.utils.checkpoint out and let the plan recompute"
        )
    return bool(record.draws)


def _fake(value: Value, device: torch.device) -> Tensor:
    made = torch.empty(value.shape, dtype=value.dtype, device=device)
    return made.requires_grad_() if value.gradient else made
