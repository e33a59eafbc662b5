"""Tensors in the place of others, with the Python attributes of a parameter."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

Make = Callable[..., tuple[Any, ...]]

_COPIES = 16  # of buffers, by the stages of a rank, for which a function keeps what it has made
_MADE: ContextVar[dict[Make, tuple[Any, ...]] | None] = ContextVar("made", default=None)


@contextmanager
def made_once() -> Iterator[None]:
    """A pass of one microbatch, in which every `shared` function has the same arguments."""
    token = _MADE.set({})
    try:
        yield
    finally:
        _MADE.reset(token)


def shared(make: Make, *, of_inputs: bool) -> Make:
    """A function like ``make`` that is called once within a `made_once` context.

    Without ``of_inputs`` it makes tensors of sizes and buffers alone, which are the same for every
    microbatch: they are kept until it is called with other sizes, or a buffer is changed in place.
    Stages have copies of buffers, so that several on a rank call it with other ones in turn.
    """
    own = _Kept(make)

    def made(*values: Any) -> tuple[Any, ...]:
        known = None if torch.compiler.is_compiling() else _MADE.get()
        if known is None:
            return make(*values)
        if made not in known:
            known[made] = make(*values) if of_inputs else own.made(values)
        return known[made]

    return made


class _Kept:
    """What a function has made last of some tensors, each with the number of its changes in place.

    Its key is their ids, which are no other tensors' as long as they are kept.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._last: dict[tuple[int, ...], tuple[tuple[Any, ...], list[int], tuple[Any, ...]]] = {}

    def made(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the function makes of ``values``."""
        tensors = [one for one in values if isinstance(one, Tensor)]
        if torch.is_inference_mode_enabled() or any(isinstance(one, FakeTensor) for one in tensors):
            return self._make(*values)
        key = tuple(map(id, tensors))
        if key in self._last:
            of, versions, found = self._last.pop(key)
            if all(map(_is_same, of, values)) and versions == _versions(of, found):
                self._last[key] = of, versions, found
                return found
        elif len(self._last) == _COPIES:
            del self._last[next(iter(self._last))]
        with _disable_current_modes():  # in a trace it is a constant
            found = self._make(*values)
        self._last[key] = values, _versions(values, found), found
        return found


def _is_same(one: Any, other: Any) -> bool:
    return one is other if isinstance(one, Tensor) else bool(one == other)


def _versions(*groups: Iterable[Any]) -> list[int]:
    return [one._version for group in groups for one in group if isinstance(one, Tensor)]


Modules = TypeVar("Modules", bound=nn.Module | list[nn.Module] | tuple[nn.Module, ...])
T = TypeVar("T", bound=Tensor)


def twin(tensor: T, values: Tensor) -> T:
    """A tensor of ``values`` with the class, the attributes and the hooks of ``tensor``."""
    made: Any = values
    if isinstance(tensor, nn.Parameter):
        made = torch.Tensor._make_subclass(type(tensor), values, tensor.requires_grad)
    vars(made).update(vars(tensor))
    if tensor.requires_grad:
        for hook in (tensor._backward_hooks or {}).values():
            made.register_hook(hook)
    return cast(T, made)


def twins(modules: list[nn.Module], shared: Collection[int]) -> list[nn.Module]:
    """A copy of ``modules`` with their tensors, but copies of the ``shared`` ones, by their ids.

    Torch would copy them without attributes and hooks.
    """
    whole = nn.ModuleList(modules)
    memo = {
        id(one): twin(one, one.detach().clone()) if id(one) in shared else one
        for one in [*whole.parameters(), *whole.buffers()]
    }
    return copied(modules, memo)


def copied(model: Modules, known: Mapping[int, Any]) -> Modules:
    """A copy of a module or a list of them, with what is ``known`` in place of objects, by id.

    Tensors that a forward has computed and left in attributes, as that of the old
    ``torch.nn.utils.weight_norm`` does, are copied without their graph.
    """
    parts = model.modules() if isinstance(model, nn.Module) else nn.ModuleList(model).modules()
    computed = {
        id(one): one.detach()
        for part in parts
        for one in vars(part).values()
        if isinstance(one, Tensor) and not one.is_leaf
    }
    return copy.deepcopy(model, {**computed, **known})
