"""Tensors in the place of others, with the Python attributes of a parameter."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

Make = Callable[..., tuple[Any, ...]]

_MADE: ContextVar[dict[Make, tuple[Any, ...]] | None] = ContextVar("made", default=None)


@contextmanager
def made_once() -> Iterator[None]:
    """A pass of one microbatch, in which every `shared` function has the same arguments."""
    token = _MADE.set({})
    try:
        yield
    finally:
        _MADE.reset(token)


def shared(make: Make) -> Make:
    """A function like ``make`` that is called only once within a `made_once` context."""

    def made(*values: Any) -> tuple[Any, ...]:
        known = None if torch.compiler.is_compiling() else _MADE.get()
        if known is None:
            return make(*values)
        if made not in known:
            known[made] = make(*values)
        return known[made]

    return made


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
