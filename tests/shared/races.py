"""Happens-before between two streams by vector clocks: a detector of data races.

A stream's clock counts its own accesses, and holds how far into the other one it has waited. An
access in one stream is ordered after one in the other if the clock has reached it.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stagewright.formulations.plans.plan import PipelinePlan

MAIN, SUB = 0, 1


@dataclass
class Clocks:
    """Two streams, their events, and what was accessed when; ``dropped`` waits are left out."""

    dropped: Collection[int] = ()
    now: int = MAIN
    waited: set[int] = field(default_factory=set)
    races: list[str] = field(default_factory=list)
    _clock: list[list[int]] = field(default_factory=lambda: [[0, 0], [0, 0]])
    _events: dict[int, list[int]] = field(default_factory=dict)
    _read: dict[tuple[Hashable, int], int] = field(default_factory=dict)
    _written: dict[tuple[Hashable, int], int] = field(default_factory=dict)

    @contextmanager
    def sub(self) -> Iterator[None]:
        assert self.now == MAIN
        self.now = SUB
        yield
        self.now = MAIN

    def record(self, event: int) -> None:
        self._events[event] = list(self._clock[self.now])

    def wait(self, event: int) -> None:
        self.waited.add(event)
        if event not in self.dropped:
            own = self._clock[self.now]
            self._clock[self.now] = [
                max(a, b) for a, b in zip(own, self._events[event], strict=True)
            ]

    def access(self, datum: Hashable, name: str, *, writes: bool) -> None:
        clock, other = self._clock[self.now], 1 - self.now
        clock[self.now] += 1
        before = [self._written, self._read] if writes else [self._written]
        if any(found.get((datum, other), 0) > clock[other] for found in before):
            self.races.append(f"{name} in stream {self.now}")
        (self._written if writes else self._read)[datum, self.now] = clock[self.now]


class RecordedStreams(Clocks):
    """The executor's interface of streams, carried out in one and noted."""

    def __init__(self, dropped: Collection[int] = (), keeps: bool = True) -> None:
        super().__init__(dropped)
        self.kept: set[tuple[int, int]] = set()
        self.keeps = keeps

    def main(self) -> Any:
        assert self.now == MAIN
        return nullcontext()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        if self.keeps:
            self.kept |= {(storage_of(one), self.now) for one in tensors}


class Accesses(TorchDispatchMode):
    """Notes which operation reads and writes which memory, in the current stream of ``streams``.

    Memory that an operation makes belongs to its stream: another one may use it only after a
    ``keep``. All of it stays in use, so that no two tensors are ever at the same place.
    """

    def __init__(self, streams: RecordedStreams) -> None:
        super().__init__()
        self.streams = streams
        self._made: dict[int, int] = {}
        self._held: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        given = {argument.name: argument for argument in func._schema.arguments}
        values = {**dict(zip(given, args, strict=False)), **kwargs}
        for name, value in values.items():
            writes = given[name].alias_info is not None and given[name].alias_info.is_write
            for one in tensors_in(value):
                self._touch(one, str(func), writes=writes)
        for one in tensors_in(outputs):
            self._held.append(one.untyped_storage())
            if storage_of(one) not in self._known(values):
                self._made.setdefault(storage_of(one), self.streams.now)
                self._touch(one, str(func), writes=True)
        return outputs

    def _known(self, values: dict[str, Any]) -> set[int]:
        return {storage_of(one) for one in tensors_in(list(values.values()))}

    def _touch(self, one: Tensor, name: str, *, writes: bool) -> None:
        storage, now = storage_of(one), self.streams.now
        self._held.append(one.untyped_storage())
        self.streams.access(storage, name, writes=writes)
        if self._made.get(storage, now) != now and (storage, now) not in self.streams.kept:
            self.streams.races.append(f"{name} reads memory of the other stream")


def tensors_in(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def storage_of(one: Tensor) -> int:
    return int(one.untyped_storage()._cdata)


def in_two_streams(plan: PipelinePlan, chosen: Collection[str] | None = None) -> PipelinePlan:
    """``plan`` with ``chosen`` weight gradients, or all, in the sub-stream."""
    marked = tuple(
        replace(one, stream="sub")
        if "W" in one.action and (chosen is None or one.action in chosen)
        else one
        for one in plan.actions
    )
    return replace(plan, schedule=replace(plan.schedule, actions=marked))
