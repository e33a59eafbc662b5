"""The inputs of a model: tensors with samples, and everything else, which is fixed."""

from collections.abc import Mapping, Sequence
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
class Signature:
    """How a model is called: the structure of its arguments, with ``TENSOR`` for each tensor.

    ``leaves`` are the arguments' parts in order; ``structure`` puts them together to
    ``(arguments, keywords)``.
    """

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with ``tensors`` in their places."""
        given = iter(tensors)
        leaves = [next(given) if one is TENSOR else one for one in self.leaves]
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(
            leaves, self.structure
        )
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' places: a keyword, or a position."""
        every, _ = pytree.tree_flatten_with_path(
            pytree.tree_unflatten(list(self.leaves), self.structure)
        )
        return tuple(_place(path) for path, leaf in every if leaf is TENSOR)

    @property
    def is_positional(self) -> bool:
        """Whether the model is called with tensors by position alone."""
        arguments, keywords = self.arguments([TENSOR] * len(self.leaves))
        return not keywords and all(one is TENSOR for one in arguments)

    def require_same(self, other: "Signature") -> None:
        """Refuse inputs of ``other`` where the model was captured for these."""
        if self == other:
            return
        raise InputError(
            f"the model was captured for inputs ({_shown(self)}), a mini-batch has "
            f"({_shown(other)}); give every mini-batch the same keywords and other values"
        )


def signed(inputs: Any) -> tuple[tuple[Tensor, ...], Signature]:
    """The tensors of a model's inputs, and how it is called with them.

    ``inputs`` are a tensor, a tuple of arguments, or a mapping of keywords; both may hold further
    tuples, lists and mappings.

    Raises
    ------
    InputError
        If they hold something else than tensors and plain values, or no tensor.
    """
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        keywords = dict(sorted(inputs.items()))
    else:
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    leaves, structure = pytree.tree_flatten((arguments, keywords))
    for one in leaves:
        if not isinstance(one, (Tensor, *PLAIN)):
            raise InputError(
                "inputs must be a tensor, a tuple of arguments or a dict of keywords, of tensors "
                f"and plain values; got {type(one).__name__}"
            )
    tensors = tuple(one for one in leaves if isinstance(one, Tensor))
    if not tensors:
        raise InputError("inputs hold no tensor")
    kept = tuple(TENSOR if isinstance(one, Tensor) else one for one in leaves)
    return tensors, Signature(kept, structure)


def _place(path: Sequence[Any]) -> str:
    (_, first), *rest = ((str(one), one) for one in path[1:])
    name = str(getattr(first, "key", getattr(first, "idx", first)))
    return name + "".join(one for one, _ in rest)


def _shown(signature: Signature) -> str:
    every, _ = pytree.tree_flatten_with_path(
        pytree.tree_unflatten(list(signature.leaves), signature.structure)
    )
    return ", ".join(f"{_place(path)}: {leaf!r}" for path, leaf in every)
