"""The inputs of a model: tensors with samples, and everything else, which is fixed."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stagewright.graphs.documents.errors import InputError

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


class _Tensor:
    """Stands where a tensor was."""

    def __repr__(self) -> str:
        return "a tensor"


TENSOR = _Tensor()


@dataclass(frozen=True, slots=True)
class ValueStructure:
    """A value without its tensors: its parts in order, ``TENSOR`` for each tensor; its tree."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    def holding(self, tensors: Iterable[Any]) -> Any:
        """The value with ``tensors`` in their places."""
        given = iter(tensors)
        leaves = [next(given) if one is TENSOR else one for one in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a tensor itself."""
        return self.spec.is_leaf() and self.leaves == (TENSOR,)


def taken_apart(value: Any) -> tuple[tuple[Tensor, ...], ValueStructure]:
    """The tensors in a value, and the value's structure without them."""
    leaves, spec = pytree.tree_flatten(value)
    kept = tuple(TENSOR if isinstance(one, Tensor) else one for one in leaves)
    return tuple(one for one in leaves if isinstance(one, Tensor)), ValueStructure(kept, spec)


@dataclass(frozen=True, slots=True)
class Signature:
    """How a model is called: the structure of ``(arguments, keywords)``."""

    structure: ValueStructure

    def arguments(self, tensors: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with ``tensors`` in their places."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = self.structure.holding(tensors)
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' places: a keyword, or a position."""
        return tuple(place for place, leaf in self._places() if leaf is TENSOR)

    @property
    def is_positional(self) -> bool:
        """Whether the model is called with tensors by position alone."""
        arguments, keywords = self._given()
        return not keywords and all(one is TENSOR for one in arguments)

    def require_same(self, other: "Signature") -> None:
        """Refuse inputs of ``other`` where the model was captured for these."""
        if self == other:
            return
        raise InputError(
            f"the model was captured for inputs ({self._shown()}), a mini-batch has "
            f"({other._shown()}); give every mini-batch the same keywords and other values"
        )

    def _shown(self) -> str:
        return ", ".join(f"{place}: {leaf!r}" for place, leaf in self._places())

    def _places(self) -> list[tuple[str, Any]]:
        every, _ = pytree.tree_flatten_with_path(self._given())
        return [(_place(path), leaf) for path, leaf in every]

    def _given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.arguments(itertools.repeat(TENSOR))


def signed(inputs: Any) -> tuple[tuple[Tensor, ...], Signature]:
    """The tensors of a model's inputs, and the signature of the call.

    ``inputs`` are a tensor, a tuple of arguments, or a mapping of keywords; both may hold further
    tuples, lists and mappings. Raises InputError if they hold something else than tensors and plain
    values, or no tensor.
    """
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        keywords = dict(sorted(inputs.items()))
    else:
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    tensors, structure = taken_apart((arguments, keywords))
    for one in structure.leaves:
        if one is not TENSOR and not isinstance(one, PLAIN):
            raise InputError(
                "inputs must be a tensor, a tuple of arguments or a dict of keywords, of tensors "
                f"and plain values; got {type(one).__name__}"
            )
    if not tensors:
        raise InputError("inputs hold no tensor")
    return tensors, Signature(structure)


def _place(path: Sequence[Any]) -> str:
    (_, first), *rest = ((str(one), one) for one in path[1:])
    name = str(getattr(first, "key", getattr(first, "idx", first)))
    return name + "".join(one for one, _ in rest)
