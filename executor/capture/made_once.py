"""Masks and positions that several layers make of the same values: once while a stage runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

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
