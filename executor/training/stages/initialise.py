"""A model with a rank's own layers only; the others stay on torch's meta device."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.executor.capture.evaluation import with_evaluation
from stagewright.executor.capture.exported.exporting import Example
from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.capture.python_state import made_plain
from stagewright.executor.capture.tracing import capture
from stagewright.executor.capture.twins import copied, twin
from stagewright.executor.training.stages.partial_build import (
    CannotBuild,
    Outline,
    build,
    outline_of,
)
from stagewright.executor.training.stages.stored_weights import StoredWeights
from stagewright.graphs.documents.errors import InputError

Model = nn.Module | list[nn.Module] | tuple[nn.Module, ...]


def initialise(
    model: Model | Callable[[], Model],
    wanted: Collection[int],
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    example: Example | None = None,
    weights: StoredWeights | None = None,
    evaluates: bool = False,
) -> LayeredModel:
    """Capture ``model`` with the layers ``wanted`` on ``device`` and all others on meta.

    A module or a list of modules is copied and stays as it is. A factory is called after
    ``torch.manual_seed(seed)``, with memory for the wanted layers alone, but their tensors are as
    those of a plain call; if it reads values of other layers, it is called plainly, and the rest is
    dropped. ``weights`` take the place of parameters and persistent buffers. ``example`` as in
    `capture`. If it ``evaluates``, the model is captured as it is in evaluation, too. Raises
    InputError if the model cannot be captured, or ``weights`` are another model's.
    """
    if isinstance(model, nn.Module | list | tuple):
        found, like, is_given = _with_same_tensors(model), None, True
    else:
        (found, like), is_given = _built(model, wanted, seed, example, weights), False
    found = made_plain(found)
    layered = capture(found, example, like)
    if evaluates:
        layered = with_evaluation(found, layered, example, like)
    if weights is not None:
        weights.require(_as_module(found))
        stored = _stored(layered, wanted, weights)
        _replace(layered, {key: _read(weights, *one, dtype) for key, one in stored.items()})
    return place(layered, wanted, device, dtype, copied=is_given)


@dataclass(frozen=True, slots=True, eq=False)
class OutlinedModel:
    """A factory of modules that was called without data under ``seed``, and the capture of that."""

    factory: Callable[[], Model]
    seed: int
    outline: Outline
    captured: LayeredModel

    def __call__(self) -> Model:
        """Call the factory again."""
        return self.factory()


def outlined(
    factory: Callable[[], Model], seed: int, example: Example | None, *, evaluates: bool = False
) -> OutlinedModel:
    """Call ``factory`` without data and capture what it makes; one that was is returned as it is.

    Raises CannotBuild if it reads values, InputError if the model cannot be captured.
    """
    if isinstance(factory, OutlinedModel) and factory.seed == seed:
        return factory
    outline = outline_of(factory, seed)
    captured = capture(outline.model, example)
    if evaluates:
        captured = with_evaluation(outline.model, captured, example)
    return OutlinedModel(factory, seed, outline, captured)


def _built(
    factory: Callable[[], Model],
    wanted: Collection[int],
    seed: int,
    example: Example | None,
    weights: StoredWeights | None,
) -> tuple[Model, LayeredModel | None]:
    """The model, with data for the wanted layers at least, and a capture of one like it."""
    try:
        known = outlined(factory, seed, example)
        return _built_partly(known, wanted, weights), known.captured
    except (CannotBuild, InputError):  # a plain call does it, or says in its own words what fails
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return factory(), None


def _built_partly(
    known: OutlinedModel, wanted: Collection[int], weights: StoredWeights | None
) -> Model:
    """The model with data for the ``wanted`` layers that ``weights`` lack."""
    outline, layered = known.outline, known.captured
    every = outline.numbers(_tensors(_as_module(outline.model)))
    stored = {} if weights is None else _stored(layered, wanted, weights)
    own = [layer.module for i, layer in enumerate(layered.layers) if i in wanted]
    needed = [one for one in _tensors(*own) if id(one) not in stored]
    return build(known.factory, known.seed, outline, every - outline.numbers(needed))


def _stored(
    layered: LayeredModel, wanted: Collection[int], weights: StoredWeights
) -> dict[int, tuple[Tensor, tuple[str, ...]]]:
    """The wanted layers' tensors that are stored, with their names, by id."""
    here = _wanted_ids(layered, wanted)
    every = {**layered.parameters_by_name(), **layered.buffers_by_name()}
    return {
        id(one): (one, names)
        for names, one in every.items()
        if id(one) in here and weights.entry(names) is not None
    }


def _read(
    weights: StoredWeights, tensor: Tensor, names: Sequence[str], dtype: torch.dtype | None
) -> Tensor:
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return twin(tensor, weights.read(names).to(kind))


def _with_same_tensors(model: Model) -> Model:
    """A copy of the modules that shares the tensors."""
    shared = {id(tensor): tensor for tensor in _tensors(_as_module(model))}
    try:
        return copied(model, shared)
    except Exception as error:  # the model's own code raises anything
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"the model cannot be copied: {type(error).__name__}: {reason}; give a function that "
            "makes it"
        ) from error


def _as_module(model: Model) -> nn.Module:
    return model if isinstance(model, nn.Module) else nn.ModuleList(model)


def _ranks_on_host() -> int:
    world = os.environ.get("WORLD_SIZE", "1")
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def _from_meminfo(entry: str) -> float:
    meminfo = Path("/proc/meminfo")
    found = re.search(rf"{entry}:\s*(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    return int(found[1]) * 1024.0 if found else float("inf")


def free_bytes() -> float:
    """The memory of this host that processes may still take."""
    return _from_meminfo("MemAvailable")


def total_bytes(device: torch.device) -> float:
    """All memory of a GPU, or this rank's share of its host's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return _from_meminfo("MemTotal") / _ranks_on_host()


# Moving tensors: the same tensor may be registered in several modules and under several names


def _registered(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Every parameter and buffer of ``modules`` themselves, with the place that holds it."""
    return [
        (registered, name, tensor)
        for module in modules
        for registered in (module._parameters, module._buffers)
        for name, tensor in registered.items()
        if tensor is not None
    ]


def _tensors(*modules: nn.Module) -> list[Tensor]:
    """Every parameter and buffer in the trees of ``modules`` once."""
    every = _registered(part for module in modules for part in module.modules())
    return list({id(tensor): tensor for _, _, tensor in every}.values())


def _modules(layered: LayeredModel, wanted: Collection[int] | None = None) -> list[nn.Module]:
    """The modules of the ``wanted`` layers (default: all), evaluation's layers included."""
    captures = [layered] if layered.evaluation is None else [layered, layered.evaluation]
    return [
        layer.module
        for one in captures
        for i, layer in enumerate(one.layers)
        if wanted is None or i in wanted
    ]


def _wanted_ids(layered: LayeredModel, wanted: Collection[int]) -> set[int]:
    return {id(tensor) for tensor in _tensors(*_modules(layered, wanted))}


def _replace(layered: LayeredModel, new: Mapping[int, Tensor]) -> None:
    """Put ``new[id(tensor)]`` wherever ``tensor`` is registered."""
    parts = {id(part): part for module in _modules(layered) for part in module.modules()}.values()
    for registered, name, tensor in _registered(parts):
        registered[name] = new.get(id(tensor), tensor)


def place(
    layered: LayeredModel,
    wanted: Collection[int],
    device: torch.device | str,
    dtype: torch.dtype | None,
    *,
    copied: bool = False,
) -> LayeredModel:
    """Put the wanted layers' tensors on ``device``, as copies if asked, and the others on meta.

    Tensors that were the same stay so.
    """
    here = _wanted_ids(layered, wanted)
    tensors = _tensors(*_modules(layered))
    new: dict[int, Tensor] = {}
    for tensor in tensors:
        values = tensor.detach().to(
            device if id(tensor) in here else "meta",
            dtype if tensor.is_floating_point() else None,
            copy=copied,
        )
        new[id(tensor)] = twin(tensor, values)
    _replace(layered, new)
    return layered
