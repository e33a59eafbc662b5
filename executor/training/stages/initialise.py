"""A model with a rank's own layers only; the others stay on torch's meta device."""

import copy
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.executor.capture.exported.exporting import Example
from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.capture.tracing import capture
from stagewright.executor.capture.twins import twin
from stagewright.executor.training.stages.seeding import module_seed
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_bytes

Model = nn.Module | list[nn.Module] | tuple[nn.Module, ...]


def initialise(
    model: Model | Callable[[], Model],
    wanted: Collection[int],
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    agree: Callable[[bool], bool] = bool,
    ranks_on_host: int | None = None,
    available_bytes: float | None = None,
    example: Example | None = None,
) -> LayeredModel:
    """Capture ``model`` with the layers ``wanted`` on ``device`` and all others on meta.

    A module or a list of modules is copied and stays as it is. A factory is called on meta, to see
    how big the model is, and then after ``torch.manual_seed(seed)``, so that every rank draws the
    same parameters. If ``ranks_on_host`` whole models do not fit into ``available_bytes`` together,
    only the wanted parameters are made: every module draws its own with ``reset_parameters``, under
    a separate seed. All ranks must do the same: ``agree`` gets whether this rank can make the whole
    model and returns whether all can. ``example`` as in `capture`.

    Raises
    ------
    InputError
        If the model cannot be captured, or is too big and has a module that cannot draw its own
        parameters.
    """
    if isinstance(model, nn.Module | list | tuple):
        layered = capture(_with_same_tensors(model), example)
        return place(layered, wanted, device, dtype, copied=True)
    outline = _outline(model)
    if outline is not None:
        size = sum(tensor.nbytes for tensor in _tensors(outline))
        ranks = _ranks_on_host() if ranks_on_host is None else ranks_on_host
        room = _available_bytes() if available_bytes is None else available_bytes
        if not agree(size * ranks <= room):
            warnings.warn(_warning(size, ranks), stacklevel=2)
            layered = capture(outline, example)
            _make(outline, layered, wanted, seed)
            return place(layered, wanted, device, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole = model()
    return place(capture(whole, example), wanted, device, dtype)


def _with_same_tensors(model: Model) -> Model:
    """A copy of the modules that shares the tensors."""
    shared = {id(tensor): tensor for tensor in _tensors(_as_module(model))}
    return copy.deepcopy(model, dict[int, Any](shared))


def _as_module(model: Model) -> nn.Module:
    return model if isinstance(model, nn.Module) else nn.ModuleList(model)


def _outline(factory: Callable[[], Model]) -> nn.Module | None:
    """The model without values; None where the factory needs them."""
    try:
        with torch.device("meta"):
            return _as_module(factory())
    except Exception:  # whatever the factory's own code raises on tensors without values
        return None


def _ranks_on_host() -> int:
    world = os.environ.get("WORLD_SIZE", "1")
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def _available_bytes() -> float:
    """Available memory of this host; infinite where the kernel does not report it."""
    return _from_meminfo("MemAvailable")


def _from_meminfo(entry: str) -> float:
    meminfo = Path("/proc/meminfo")
    found = re.search(rf"{entry}:\s*(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    return int(found[1]) * 1024.0 if found else float("inf")


def total_bytes(device: torch.device) -> float:
    """All memory of a GPU, or this rank's share of its host's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return _from_meminfo("MemTotal") / _ranks_on_host()


def _warning(size: float, ranks: int) -> str:
    return (
        f"the whole model ({format_bytes(size)}) does not fit into this host's memory {ranks} "
        "times: every module draws its parameters by its own reset_parameters, and what the "
        "factory does to them afterwards is lost"
    )


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


def _wanted_ids(layered: LayeredModel, wanted: Collection[int]) -> set[int]:
    modules = [layer.module for i, layer in enumerate(layered.layers) if i in wanted]
    return {id(tensor) for tensor in _tensors(*modules)}


def _replace(layered: LayeredModel, new: Mapping[int, Tensor]) -> None:
    """Put ``new[id(tensor)]`` wherever ``tensor`` is registered."""
    parts = (part for layer in layered.layers for part in layer.module.modules())
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
    tensors = _tensors(*(layer.module for layer in layered.layers))
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


# Making parameters module by module


def _make(outline: nn.Module, layered: LayeredModel, wanted: Collection[int], seed: int) -> None:
    """Give values to the wanted layers' tensors; a tied one gets those of its first module."""
    here = _wanted_ids(layered, wanted)
    made: dict[int, Tensor] = {}
    modules = [  # all at once, because the id of a tensor that is freed may come again
        (name, module, {field: t for _, field, t in _registered([module]) if t.is_meta})
        for name, module in outline.named_modules()
    ]
    for name, module, empty in modules:
        if here.isdisjoint(map(id, empty.values())):
            continue
        _draw(name, module, empty, module_seed(seed, name))
        for registered, field, tensor in _registered([module]):
            if field in empty:
                registered[field] = made.setdefault(id(empty[field]), tensor)
    _replace(layered, made)


def _unset(tensor: Tensor) -> Tensor:
    """A tensor on the CPU of the shape and type of ``tensor``, with values that nobody sets."""
    return torch.full_like(tensor, _mark(tensor.dtype), device="cpu")


def _is_unset(tensor: Tensor) -> bool:
    marked = (tensor == _mark(tensor.dtype)) | tensor.isnan()
    return tensor.numel() > 0 and bool(marked.all())


def _mark(dtype: torch.dtype) -> float:
    if dtype is torch.bool:
        return False
    return torch.iinfo(dtype).min if not dtype.is_floating_point else float("nan")


def _draw(name: str, module: nn.Module, empty: Mapping[str, Tensor], seed: int) -> None:
    """Let ``module`` set the values of its ``empty`` tensors."""
    reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    unset = set(empty)
    if reset is not None:
        for registered, field, tensor in _registered([module]):
            if field in empty:
                registered[field] = twin(tensor, _unset(tensor))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            reset()
        every = _registered([module])
        unset = {field for _, field, tensor in every if field in empty and _is_unset(tensor)}
    if unset:
        raise InputError(
            f"{type(module).__name__} {name!r} needs a reset_parameters that sets "
            f"{', '.join(sorted(unset))}, because the model is too big to be made whole on every "
            "rank; give it one, or start fewer ranks per host"
        )
