"""Random numbers of a layer, the same for a sample whichever device works on it.

The operators of a layer that draw, and their shapes, are recorded for a whole microbatch. A device
that has some of its samples draws for all of them, as one with the whole microbatch does, and takes
its own: dropout is then the same on one device and on several.

This works for operators that draw one number after another into a tensor, where one dimension is
the samples, or a multiple of them with each sample's entries together. A kernel that draws inside
itself, as fused attention does, and a draw in the backward are left unchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from stagewright.graphs.documents.errors import InputError

# Each number is drawn independently: the values of the arguments do not change how far the
# generator advances.
PLAIN = {
    *("bernoulli", "bernoulli_", "native_dropout", "uniform_", "normal", "normal_", "rand"),
    *("rand_like", "randn", "randn_like", "randint", "randint_like", "random_", "exponential_"),
    *("cauchy_", "log_normal_", "geometric_"),
}

Layout = tuple[tuple[int, ...], tuple[int, ...] | None]  # shape, and strides of a tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """An operator that draws, with the layouts of its tensors and its argument ``size``."""

    operator: str
    layouts: tuple[Layout, ...]


class Record(TorchDispatchMode):
    """Records operators that draw, and the storages that are read and written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []
        self.read: set[int] = set()
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _is_random(func, args, kwargs or {}):
            self.draws.append(Draw(_name(func), tuple(_layouts(func, args, kwargs or {}))))
        storages = [storage_of(one) for one in _leaves(args, kwargs) if isinstance(one, Tensor)]
        self.read.update(storages)
        if func._schema.is_mutable:
            self.written.update(storages[:1])
        return func(*args, **(kwargs or {}))


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class WholeDraw:
    """A draw for all samples; per layout the dimension of the samples, None without one."""

    operator: str
    layouts: tuple[Layout, ...]
    dimensions: tuple[int | None, ...]


def whole_draws(
    whole: Sequence[Draw], samples: int, fewer: Sequence[Draw], count: int
) -> tuple[WholeDraw, ...] | None:
    """The draws for ``samples``, by comparison with those for ``count`` samples.

    None if a share cannot take its rows of one.
    """
    if len(whole) != len(fewer):
        return None
    found = []
    for one, other in zip(whole, fewer, strict=True):
        if one.operator not in PLAIN or one.operator != other.operator:
            return None
        pairs = zip(one.layouts, other.layouts, strict=True)
        dimensions = [_dimension(a, samples, b, count) for (a, _), (b, _) in pairs]
        if UNKNOWN in dimensions:
            return None
        found.append(WholeDraw(one.operator, one.layouts, tuple(dimensions)))
    return tuple(found)


UNKNOWN = -1


def _dimension(
    whole: tuple[int, ...], samples: int, fewer: tuple[int, ...], count: int
) -> int | None:
    """The dimension of the samples in a tensor of shape ``whole``."""
    if len(whole) != len(fewer):
        return UNKNOWN
    other = [i for i, (a, b) in enumerate(zip(whole, fewer, strict=True)) if a != b]
    if not other:
        return None
    entries, rest = divmod(whole[other[0]], samples)
    fits = len(other) == 1 and rest == 0 and fewer[other[0]] == entries * count
    return other[0] if fits else UNKNOWN


class DrawsOfShare(TorchDispatchMode):
    """Draws random numbers for the whole microbatch, and takes the ``rows`` of a share."""

    def __init__(self, rows: Sequence[int], samples: int, whole: Sequence[WholeDraw]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.samples = rows, samples
        self.left = list(reversed(whole))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func, args, kwargs):
            return func(*args, **kwargs)
        if not self.left or self.left[-1].operator != _name(func):
            raise InputError(f"a layer draws by {_name(func)}, which it did not when it was traced")
        return self._drawn(func, args, kwargs, self.left.pop())

    def _drawn(self, func: Any, args: Any, kwargs: Any, whole: WholeDraw) -> Any:
        """The share's rows of ``func``'s result, drawn with arguments for the whole microbatch."""
        wide = iter(zip(whole.layouts, whole.dimensions, strict=True))

        def filled(one: Any) -> Any:
            return self._filled(one, *next(wide)) if isinstance(one, Tensor) else one

        full, named = list(tree_map(filled, args)), tree_map(filled, kwargs)
        place = _size_at(func, args)
        if place is not None:
            full[place] = list(next(wide)[0][0])
        results, spec = tree_flatten(func(*full, **named))
        pairs = zip(whole.layouts, whole.dimensions, strict=True)
        at = next(((i, shape[i]) for (shape, _), i in pairs if i is not None), None)
        own = [self._own(one, *at) if at and isinstance(one, Tensor) else one for one in results]
        if func._schema.is_mutable:
            return args[0].copy_(own[0]) if at else args[0]
        return tree_unflatten(own, spec)

    def _filled(self, one: Tensor, layout: Layout, dimension: int | None) -> Tensor:
        """A share's tensor extended to the whole microbatch: other devices' samples are zero."""
        if dimension is None:
            return one
        shape, strides = layout
        assert strides is not None
        full = one.new_empty_strided(shape, strides).zero_()
        return full.index_copy_(dimension, self._places(shape[dimension], one.device), one)

    def _own(self, drawn: Tensor, dimension: int, length: int) -> Tensor:
        return drawn.index_select(dimension, self._places(length, drawn.device))

    def _places(self, length: int, device: torch.device) -> Tensor:
        """The entries of the share's samples in a dimension of ``length`` for all samples."""
        entries = length // self.samples
        firsts = torch.tensor(self.rows, device=device)[:, None] * entries
        return (firsts + torch.arange(entries, device=device)).flatten()


def _is_random(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws; attention does so with dropout alone."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [one.name for one in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0.0) > 0


def _name(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


def _leaves(args: Any, kwargs: Any) -> list[Any]:
    return tree_flatten((args, kwargs))[0]


def _size_at(func: Any, args: Sequence[Any]) -> int | None:
    """The position in ``args`` of the shape of the drawn tensor, if any."""
    names = [one.name for one in func._schema.arguments]
    return names.index("size") if "size" in names[: len(args)] else None


def _layouts(func: Any, args: Any, kwargs: Any) -> list[Layout]:
    tensors = [one for one in _leaves(args, kwargs) if isinstance(one, Tensor)]
    found: list[Layout] = [(tuple(one.shape), one.stride()) for one in tensors]
    place = _size_at(func, args)
    return found if place is None else [*found, (tuple(args[place]), None)]


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
