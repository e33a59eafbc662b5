"""What passes between layers: shapes, types, and which values get a gradient; on fake tensors."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.executor.capture import CapturedLayer
from stagewright.graphs.errors import InputError


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that passes from layer to layer; ``gradient`` says whether one comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool

    @property
    def bytes(self) -> int:
        """The tensor's size."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """What a layer returns, which of its parameters get a gradient, and whether it draws.

    ``changes`` says whether it changes one of its buffers. ``saved_bytes`` is what autograd keeps
    of what the layer itself makes: neither its inputs nor its parameters.
    """

    outputs: tuple[Value, ...]
    trained: frozenset[str]
    random: bool
    changes: bool
    saved_bytes: int


def values_of(inputs: Sequence[Tensor], samples: int) -> tuple[Value, ...]:
    """The model's inputs, cut to ``samples``."""
    return tuple(Value((samples, *one.shape[1:]), one.dtype, gradient=False) for one in inputs)


def propagate(
    layers: Sequence[CapturedLayer],
    inputs: Sequence[Value],
    device: torch.device,
    autocast: torch.dtype | None,
) -> tuple[LayerTrace, ...]:
    """Run every layer on tensors without data.

    Raises
    ------
    InputError
        Naming the layer that does not take what the one before it returns.
    """
    runs: list[_Run] = []
    # A tensor that a module keeps without registering it is no fake one.
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        values = tuple(_fake(one, device) for one in inputs)
        for layer in layers:
            try:
                runs.append(_run(layer.module, values, device, autocast))
            except Exception as error:  # the layer's own code raises anything
                shapes = ", ".join(str(tuple(one.shape)) for one in values)
                reason = str(error).partition("\n")[0]
                raise InputError(
                    f"layer {layer.name!r} fails on inputs of shape {shapes}: "
                    f"{type(error).__name__}: {reason}"
                ) from error
            values = runs[-1].outputs
        trained = _trained(values, [one for run in runs for one in run.parameters.values()])
    return tuple(
        LayerTrace(
            tuple(Value(tuple(one.shape), one.dtype, one.requires_grad) for one in run.outputs),
            frozenset(name for name, one in run.parameters.items() if id(one) in trained),
            run.random,
            run.changes,
            run.saved_bytes,
        )
        for run in runs
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing a traceback of what is told in one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@dataclass(frozen=True, slots=True)
class _Run:
    """What running a layer showed; all tensors are fake."""

    outputs: tuple[Tensor, ...]
    parameters: dict[str, Tensor]
    random: bool
    changes: bool
    saved_bytes: int


def _run(
    module: nn.Module, inputs: Sequence[Tensor], device: torch.device, autocast: torch.dtype | None
) -> _Run:
    state: dict[str, Tensor] = {
        name: _fake(Value(tuple(one.shape), one.dtype, one.requires_grad), device)
        for name, one in (*module.named_parameters(), *module.named_buffers())
    }
    arguments = tuple(one.clone() for one in inputs)
    draws, kept = _Draws(), SavedStorages([*state.values(), *arguments])
    with (
        torch.autocast(device.type, autocast, enabled=autocast is not None),
        torch.autograd.graph.saved_tensors_hooks(kept.add, lambda saved: saved),
        draws,
    ):
        outputs = torch.func.functional_call(module, state, arguments)
    if any(one._version for one in arguments):
        raise ValueError("it changes an input in place, which other layers or a second forward use")
    parameters = {name: one for name, one in state.items() if one.requires_grad}
    changes = any(one._version for one in state.values())
    return _Run(tuple(outputs), parameters, draws.seen, changes, sum(kept.sizes.values()))


def _trained(outputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> set[int]:
    """The ids of the parameters that get a gradient from the model's outputs."""
    roots = [one for one in outputs if one.requires_grad]
    if not (roots and parameters):
        return set()
    ends = [torch.empty_like(one) for one in roots]
    gradients = torch.autograd.grad(roots, parameters, ends, allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    return {id(one) for one, gradient in pairs if gradient is not None}


def _fake(value: Value, device: torch.device) -> Tensor:
    made = torch.empty(value.shape, dtype=value.dtype, device=device)
    return made.requires_grad_() if value.gradient else made


class SavedStorages:
    """The storages that autograd saves, each once, without those of ``given`` tensors."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.given = {one.untyped_storage()._cdata for one in given}
        self.sizes: dict[int, int] = {}

    def add(self, saved: Tensor) -> Tensor:
        """The hook that packs a saved tensor."""
        storage = saved.untyped_storage()
        if storage._cdata not in self.given:
            self.sizes[storage._cdata] = storage.nbytes()
        return saved


class _Draws(TorchDispatchMode):
    """Notes whether anything draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
