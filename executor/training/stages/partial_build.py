"""A factory of modules, called so that only some of the tensors that it makes have memory.

The plain way to a stage's parameters is to make the whole model and to drop the rest; its peak is
the whole model. Here the factory is called twice. In the first call, the outline, large tensors
have no data, no numbers are drawn, and every operation is noted. In the second call, tensors on
which the wanted ones do not depend have no data; random numbers for them are drawn in the factory's
own order into scratch memory. What is kept is therefore equal, bit by bit, to what a plain call
makes under the same seed.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

SMALL_BYTES = 4096  # have data in the outline too: the factory's decisions may depend on them
CHUNK = 1 << 14  # numbers drawn at once to be dropped; see `_skip`
META, CPU = torch.device("meta"), torch.device("cpu")
# Of the tensor that they are given, these read shape and type alone.
_LIKE = (
    *("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like"),
    *("zeros_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
)
CHUNKED = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


class CannotBuild(Exception):  # noqa: N818 - named as InvalidPlan is
    """Raised if a factory reads values of tensors that have no memory."""


@dataclass(frozen=True, slots=True)
class BuildStep:
    """An operation: the memory that it reads and sets, by number, and whether it draws."""

    operation: object
    reads: frozenset[int]
    sets: frozenset[int]
    draws: bool


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """The operations of a call of a factory. Memory is numbered in the order of its making.

    ``made`` are shape and type of each, ``alive`` the numbers of what exists at the end, by key;
    ``present`` are those that had data, on which decisions of the factory may have been based.
    """

    model: Any
    steps: Sequence[BuildStep]
    made: Sequence[tuple[Any, ...]]
    alive: Mapping[int, int]
    present: Collection[int]

    def numbers(self, tensors: Collection[Tensor]) -> set[int]:
        """The memory of ``tensors``, as far as operations made it."""
        return {self.alive[key] for key in map(_key, tensors) if key in self.alive}

    def kept(self, dropped: Collection[int]) -> set[int]:
        """Memory that exists at the end or had data, except ``dropped``, and its dependencies."""
        sources: dict[int, set[int]] = {}
        for step in self.steps:
            for number in step.sets:
                sources.setdefault(number, set()).update(step.reads)
        found, ahead = set[int](), {*self.alive.values(), *self.present} - set(dropped)
        while ahead:
            found |= ahead
            ahead = set[int]().union(*(sources.get(one, ()) for one in ahead)) - found
        return found

    def draws(self, kept: Collection[int]) -> int:
        """The number of steps up to the last that draws for ``kept``."""
        drawing = (i for i, step in enumerate(self.steps, 1) if step.draws)
        return max((i for i in drawing if not self.steps[i - 1].sets.isdisjoint(kept)), default=0)


def outline_of(factory: Callable[[], Any], seed: int) -> Outline:
    """Call ``factory`` without random numbers and without memory for large tensors.

    Raises CannotBuild if it reads values of a large tensor.
    """
    building = _Building(lambda _, size: size > SMALL_BYTES)
    model = _called(factory, seed, building)
    return Outline(model, building.steps, building.made, building.alive(), building.present)


def build(factory: Callable[[], T], seed: int, outline: Outline, dropped: Collection[int]) -> T:
    """Call ``factory``; memory ``dropped`` is left on meta, all else is as after a plain call.

    Raises CannotBuild if it does something else than in the ``outline``.
    """
    kept = outline.kept(dropped)
    building = _Building(lambda number, _: number not in kept, outline.draws(kept), outline)
    model = _called(factory, seed, building)
    if len(building.steps) != len(outline.steps):
        raise CannotBuild("a second call does less than the first one")
    return model


def _called(factory: Callable[[], T], seed: int, building: "_Building") -> T:
    try:
        with torch.random.fork_rng(devices=[]), _rejections_whole(building):
            torch.manual_seed(seed)
            with _AsIfThere(building), building:
                return factory()
    except Exception as error:  # torch and the factory raise anything on tensors without data
        raise CannotBuild(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Memory:
    """Numbered memory; ``device`` is where the factory believes it to be, None if it is there."""

    number: int
    device: torch.device | None
    reference: StorageWeakRef  # keeps its address from being used again


class _Building(TorchDispatchMode):
    """Carries out a factory's operations, on tensors some of which have no data.

    ``is_absent`` says by number and bytes which new memory has none. Numbers are drawn in the first
    ``draws`` steps, as far as they are dropped. With an ``outline`` all steps must be its steps.
    """

    def __init__(
        self, is_absent: Callable[[int, int], bool], draws: int = 0, outline: Outline | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[BuildStep] = []
        self.made: list[tuple[Any, ...]] = []
        self.present: set[int] = set()
        self._is_absent, self._draws, self._outline = is_absent, draws, outline
        self._memory: dict[int, _Memory] = {}
        self._paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing here is compiled, and torch's compiler takes 90 MB once it is imported."""
        return False

    def alive(self) -> dict[int, int]:
        """The numbers of the memory that still exists, by key."""
        found = self._memory.items()
        return {key: one.number for key, one in found if not one.reference.expired()}

    def device_of(self, tensor: Tensor) -> torch.device | None:
        """Where a tensor without data would be; None for others."""
        found = self._memory.get(_key(tensor))
        return None if found is None else found.device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        given, written = _tensors_in((args, kwargs)), _written(func, args, kwargs)
        result = self._result(func, args, kwargs, given, written)
        before, device = {_key(one) for one in given}, self._device(kwargs, given)
        new: list[Tensor] = []

        def shown(one: Tensor) -> Tensor:
            if _key(one) in before:
                return one
            new.append(self._numbered(one, device))
            return new[-1]

        result = _mapped(shown, result)
        self._note(func, given, [*written, *new], draws=_draws(func))
        return result

    def _device(self, kwargs: Mapping[str, Any], given: Sequence[Tensor]) -> torch.device:
        """Where the factory believes a result to be."""
        absent = (device for one in given if (device := self.device_of(one)) is not None)
        return torch.device(kwargs.get("device") or next(absent, CPU))

    def _result(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        given: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> Any:
        absent = [one for one in given if self.device_of(one) is not None]
        if _is_maker(func) and (not absent or func.overloadpacket.__name__ in _LIKE):
            return self._make(func, args, kwargs, given)
        if not absent:
            return func(*args, **kwargs)
        if any(self.device_of(one) is None for one in written):
            if self._outline is not None or len(written) > 1:
                raise CannotBuild(f"{func} sets what it needs from what is left out")
            return written[0]
        if _draws(func):
            if {*map(_key, absent)} != {*map(_key, written)}:
                raise CannotBuild(f"{func} draws numbers by values that are left out")
            self._drop(func, args, kwargs, written)
        return func(*_mapped(_on_meta, args), **_mapped(_on_meta, _there(kwargs)))

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any], given: Sequence[Tensor]) -> Any:
        """A tensor made of a shape alone."""
        empty = func(*_mapped(_on_meta, args), **{**kwargs, "device": META})
        is_drawn = _draws(func) and len(self.steps) < self._draws
        if self._is_absent(len(self.made), empty.untyped_storage().nbytes()) and not is_drawn:
            return empty
        there = {**kwargs, "device": self._device(kwargs, given)} if given else kwargs
        return func(*_mapped(self._stand_in, args), **there)

    def _stand_in(self, one: Tensor) -> Tensor:
        """Memory that nobody reads, in place of a tensor without."""
        device = self.device_of(one)
        if device is None:
            return one
        return torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=device)

    def _drop(self, func: Any, args: Any, kwargs: Any, written: Sequence[Tensor]) -> None:
        """Draw the numbers of a tensor without data."""
        if len(self.steps) >= self._draws:
            return
        one = written[0]
        if func in CHUNKED and self.device_of(one) == CPU and one.is_contiguous():
            _skip(func, one, *args[1:], **kwargs)
        else:
            func(*_mapped(self._stand_in, args), **_mapped(self._stand_in, kwargs))

    def _numbered(self, one: Tensor, device: torch.device) -> Tensor:
        """New memory as the factory is given it."""
        number, is_there = len(self.made), one.device != META
        is_absent = self._is_absent(number, one.untyped_storage().nbytes())
        if not is_there and not is_absent and device != META:
            is_absent = True
            if self._outline is not None:
                raise CannotBuild("values depend on what is left out")
        if is_there and is_absent:
            device, one = one.device, _on_meta(one)
        self.present |= set() if is_absent else {number}
        self.made.append((tuple(one.shape), one.dtype))
        reference = StorageWeakRef(one.untyped_storage())
        believed = device if is_absent and device != META else None
        self._memory[_key(one)] = _Memory(number, believed, reference)
        return one

    def _note(
        self, operation: object, given: Sequence[Tensor], sets: Sequence[Tensor], *, draws: bool
    ) -> None:
        self.steps.append(
            BuildStep(operation, self._numbers_of(given), self._numbers_of(sets), draws)
        )
        expected, last = self._outline, len(self.steps)
        if expected is not None and (
            last > len(expected.steps)
            or expected.steps[last - 1].operation is not operation
            or expected.made[: len(self.made)][-1:] != self.made[-1:]
        ):
            raise CannotBuild(f"a second call differs from the first at operation {last}")

    def _numbers_of(self, tensors: Sequence[Tensor]) -> frozenset[int]:
        found = (self._memory.get(_key(one)) for one in tensors)
        return frozenset(one.number for one in found if one is not None)

    def join(self, *tensors: Tensor) -> None:
        """Give data to all of ``tensors`` if any of them has data."""
        self._note("join", tensors, tensors, draws=False)

    def reject(self, draw: Callable[..., Tensor], one: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Let ``draw`` set a tensor by draws that it looks at, as one operation."""
        self._paused = True
        try:
            if self.device_of(one) is None or len(self.steps) < self._draws:
                draw(self._stand_in(one), *args, **kwargs)
        finally:
            self._paused = False
        self._note(draw, [one], [one], draws=True)
        return one


class _AsIfThere(TorchFunctionMode):
    """Tensors without data tell the device that they would be on."""

    def __init__(self, building: _Building) -> None:
        super().__init__()
        self._building = building

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == _SET_DATA:  # which is no operation, and only between tensors that both have data
            self._building.join(*args)
        answer = _ON_DEVICE.get(func)
        device = self._building.device_of(args[0]) if answer else None
        return func(*args, **(kwargs or {})) if not answer or device is None else answer(device)


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_ON_DEVICE: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_meta.__get__: lambda _: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
}


@contextmanager
def _rejections_whole(building: _Building) -> Iterator[None]:
    """``trunc_normal_`` draws again until every number is within its bounds: one operation."""
    draw = torch.nn.init._no_grad_trunc_normal_

    def rejected(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return building.reject(draw, tensor, *args, **kwargs)

    torch.nn.init._no_grad_trunc_normal_ = rejected
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = draw


def _skip(func: Any, one: Tensor, *args: Any, **kwargs: Any) -> None:
    """Draw as many numbers as ``one`` takes, by parts.

    The generator is afterwards where one draw would leave it: torch draws normal numbers in blocks
    of 16, and the last block again where it is not whole (normal_fill in ATen).
    """
    left = one.numel()
    while left:
        size = CHUNK if left >= 2 * CHUNK else left
        func(torch.empty(size, dtype=one.dtype), *args, **kwargs)
        left -= size


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_maker(func: Any) -> bool:
    """Whether an operation makes a tensor on a device that it may be told."""
    name = func.overloadpacket.__name__
    tensors = any(isinstance(one.type, torch.TensorType) for one in func._schema.arguments)
    return name in _LIKE or (
        not tensors and "device" in {one.name for one in func._schema.arguments}
    )


def _there(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": META} if kwargs.get("device") is not None else kwargs


def _on_meta(one: Tensor) -> Tensor:
    if one.device == META:
        return one
    return torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=META)


def _tensors_in(values: Any) -> list[Tensor]:
    return [one for one in pytree.tree_leaves(values) if isinstance(one, Tensor)]


def _mapped(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    return pytree.tree_map_only(Tensor, change, values)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation sets in place."""
    named = {one.name: one for one in func._schema.arguments}
    pairs = [*zip(named.values(), args, strict=False), *((named[k], v) for k, v in kwargs.items())]
    found = [value for one, value in pairs if one.alias_info and one.alias_info.is_write]
    return _tensors_in(found)
