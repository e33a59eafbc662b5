"""Python state of a module's forward that a trace changes, and modules made plain before it.

A traced forward runs once, and a recomputed one twice for each microbatch: a counter, a list that
grows, or a random generator would then differ from a plain loop. Two forwards in sequence show it:
an attribute that both change is state. One that the second leaves unchanged, such as a cache, is
not, nor is a tensor that is only stored.
"""

import gc
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import _lru_cache_wrapper
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, fx, nn
from torch._dynamo import OptimizedModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from stagewright.executor.capture.draws import Record, storage_of
from stagewright.graphs.documents.errors import InputError


def made_plain(model: Any) -> Any:
    """The module or list that is captured in place of ``model``; its parts are replaced in place.

    Modules that torch.compile wraps take the place of their wrapper, whose kernels cannot run on
    tensors without data; `Executor(compile=True)` compiles layers. Names are those of the plain
    module, as in ``torch.distributed.checkpoint``. Gradients of embeddings are dense: the same
    numbers, which are summed over microbatches and devices.
    """
    if isinstance(model, list | tuple):
        return [made_plain(one) for one in model]
    model = _unwrapped(model)
    if not isinstance(model, nn.Module):
        return model
    for module in model.modules():
        module._compiled_call_impl = None  # of module.compile()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False
        for name, child in module._modules.items():
            module._modules[name] = _unwrapped(child)
    return model


def _unwrapped(module: Any) -> Any:
    while isinstance(module, OptimizedModule):
        module = module._orig_mod
    return module


def require_plain_tensors(model: nn.Module, prefix: str = "") -> None:
    """Refuse parameters whose properties their copies would not have."""
    for name, one in model.named_parameters():
        if isinstance(one, DTensor):
            raise InputError(
                f"parameter {prefix + name!r} is a DTensor, as parallelize_module, fully_shard or "
                "a device mesh of transformers make it: give the plain module, which the plan "
                "divides itself (a stage's tensor degree, by its tp_plan)"
            )
        if is_lazy(one):
            raise InputError(
                f"parameter {prefix + name!r} has no shape yet; call the model once before"
            )
        if one._post_accumulate_grad_hooks:
            raise InputError(
                f"parameter {prefix + name!r} has a hook that runs after its gradient is "
                "accumulated; gradients are summed up over microbatches and devices first: remove "
                "the hook"
            )


def first_step(module: nn.Module) -> Any:
    """``module``, or the first module of a sequence, which is given the input."""
    while isinstance(module, nn.Sequential) and len(module):
        if type(module).forward is not nn.Sequential.forward:
            break
        module = module[0]
    return module


def is_in_place(module: nn.Module) -> bool:
    """Whether a module changes its input."""
    return getattr(module, "inplace", False) is True


DEPTH = 6  # of nested containers and objects
_TRACING = {"torch", "sympy", "mpmath", "stagewright"}
_CACHES: "list[_lru_cache_wrapper[Any]]" = []
_REGISTERED = {"_parameters", "_buffers", "_modules"}
CURE = "keep it in a buffer"

CONTAINERS = (dict, list, set, deque, OrderedDict, defaultdict)

Attribute = tuple[str, str]  # the module's path and the attribute's name


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values of all attributes, in a form that can be compared, and the tensors among them."""

    values: Mapping[Attribute, Any]
    tensors: Mapping[Attribute, tuple[Tensor, ...]]

    def changed(self, other: "Snapshot") -> set[Attribute]:
        """The attributes that differ in ``other`` by more than their tensors."""
        keys = self.values.keys() | other.values.keys()
        return {key for key in keys if self.values.get(key) != other.values.get(key)}

    def replaced(self, other: "Snapshot") -> dict[Attribute, tuple[Tensor, ...]]:
        """The tensors in the snapshot ``other`` that are not in this snapshot."""
        known = {id(one) for tensors in self.tensors.values() for one in tensors}
        new = {
            key: tuple(one for one in tensors if id(one) not in known)
            for key, tensors in other.tensors.items()
        }
        return {key: tensors for key, tensors in new.items() if tensors}


_ELSEWHERE = ("", "")  # the generators of all modules


def snapshot(module: nn.Module) -> Snapshot:
    """The attributes of ``module`` and its submodules, without registered tensors and modules."""
    values: dict[Attribute, Any] = {}
    tensors: dict[Attribute, tuple[Tensor, ...]] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _REGISTERED:
                found: list[Tensor] = []
                values[path, name] = _comparable(value, found, frozenset())
                tensors[path, name] = tuple(found)
    values[_ELSEWHERE] = (random.getstate(), repr(np.random.get_state()))  # noqa: NPY002
    return Snapshot(values, tensors)


def plain_state(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Numbers and texts of a model's modules, on which its calls may depend, and its tensors."""
    state: dict[tuple[str, str], Any] = {}
    for path, part in model.named_modules():
        state[path, ""] = type(part)
        for name, value in vars(part).items():
            if isinstance(value, bool | int | float | str | tuple | None):
                state[path, name] = repr(value)
        for name, one in [*part._parameters.items(), *part._buffers.items()]:
            if one is not None:
                state[path, name] = one.shape, one.dtype, one.requires_grad
    return state


def described(module: nn.Module, attribute: Attribute) -> str:
    """The attribute in a message."""
    path, name = attribute
    if attribute == _ELSEWHERE:
        return "the state of Python's or NumPy's random numbers (draw from torch instead)"
    owner = type(module.get_submodule(path)).__name__
    what = "what its hooks keep" if name.endswith(("_hooks", "_pre_hooks")) else repr(name)
    return f"{what} of {owner}{f' {path!r}' if path else ''} ({CURE})"


def require_stateless(
    layer: str, module: nn.Module, before: Snapshot, record: Record, again: Callable[[], Record]
) -> None:
    """Refuse a forward that does something else ``again``.

    ``before`` is the snapshot before it ran; ``record`` has the storages of its tensors. Raises
    InputError naming the attribute that it changes.
    """
    once = snapshot(module)
    stored = before.replaced(once)
    moving = _written(before.tensors, record.written)
    if before.changed(once) or stored:
        second = again()
        twice = snapshot(module)
        moving |= before.changed(once) & once.changed(twice)
        moving |= _written(stored, second.written)
        moving |= _written(stored, second.read) & once.replaced(twice).keys()
    if moving:
        raise InputError(
            f"the forward of layer {layer!r} changes {described(module, min(moving))}: it would "
            "be another where a plan recomputes or replicates the layer"
        )


def _written(
    tensors: Mapping[Attribute, tuple[Tensor, ...]], storages: Collection[int]
) -> set[Attribute]:
    return {
        key for key, held in tensors.items() if any(storage_of(one) in storages for one in held)
    }


@contextmanager
def attributes_kept(module: nn.Module, *, finds_caches: bool = True) -> Iterator[None]:
    """Undo what a forward keeps, as what is made while tracing is invalid.

    These are attributes of modules, and results of functions and methods with a cache. To find
    the caches takes 50 ms: not ``finds_caches`` knows those of the last time.
    """
    if finds_caches:
        _find_caches()
    known = list(_CACHES)
    before = [(part, dict(vars(part))) for part in module.modules()]
    contents = [
        (value, value.copy())
        for _, attributes in before
        for value in attributes.values()
        if type(value) in CONTAINERS
    ]
    generators = random.getstate(), np.random.get_state()  # noqa: NPY002
    made = [one.cache_info().misses for one in known]
    try:
        yield
    finally:
        for one, misses in zip(known, made, strict=True):
            if one.cache_info().misses != misses:
                one.cache_clear()
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)
        for value, content in contents:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(content)
        random.setstate(generators[0])
        np.random.set_state(generators[1])  # noqa: NPY002


def _find_caches() -> None:
    """Note all caches of functions, but for those of the libraries that trace."""
    _CACHES[:] = [
        one
        for one in gc.get_objects()
        if type(one) is _lru_cache_wrapper
        and str(getattr(one, "__module__", "")).partition(".")[0] not in _TRACING
    ]


def _comparable(value: Any, tensors: list[Tensor], within: frozenset[int]) -> Any:
    """``value`` in plain tuples; its tensors go to ``tensors``."""
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return type(value), repr(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor, value._version
    if isinstance(value, fx.Proxy):
        return fx.Proxy
    if isinstance(value, nn.Module | type) or id(value) in within or len(within) >= DEPTH:
        return type(value), id(value)
    inside = within | {id(value)}
    return type(value), [_comparable(one, tensors, inside) for one in _parts(value)]


def _parts(value: Any) -> list[Any]:
    """The parts of ``value``."""
    for kind, parts in PARTS.items():
        if isinstance(value, kind):
            return parts(value)
    state = getattr(value, "__dict__", None)
    return [id(value), *(state.items() if isinstance(state, dict) else ())]


def _of_function(value: FunctionType) -> list[Any]:
    cells = [one.cell_contents for one in value.__closure__ or () if _is_full(one)]
    return [id(value), *cells, *(value.__defaults__ or ())]


def _is_full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


PARTS: dict[type, Callable[[Any], list[Any]]] = {
    list: list,
    tuple: list,
    deque: list,
    set: lambda value: sorted(map(repr, value)),
    dict: lambda value: list(value.items()),
    FunctionType: _of_function,
    MethodType: lambda value: [value.__self__, id(value.__func__)],
    random.Random: lambda value: [value.getstate()],
    np.random.Generator: lambda value: [repr(value.bit_generator.state)],
}
