"""A CUDA graph on the CPU: operations recorded with their memory, and done again in it.

As a GPU does, a capture does none of the work, a replay does all of it in the same places, and
what reads a number on the host is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stagewright.executor.training.interpreter.streams import OneStream

aten = torch.ops.aten
READ_BY_HOST = (
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.item.default,
)


class HostReads(RuntimeError):  # noqa: N818 - says what happened
    """An operation whose result the host waits for."""


@dataclass
class Operation:
    function: Any
    args: Any
    kwargs: Any
    outputs: list[tuple[int, Tensor]]  # those in memory of their own, and their positions

    def replay(self) -> None:
        found = _tensors(self.function(*self.args, **self.kwargs))
        for i, place in self.outputs:
            if self.function is not aten.empty.memory_format:  # its values do not matter
                assert found[i].stride() == place.stride()
                place.copy_(found[i])


class Capture(TorchDispatchMode):
    """Records all operations; what they change that was there before is restored at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READ_BY_HOST:
            raise HostReads(str(func))
        given = {_place(one) for one in _tensors([args, kwargs])}
        changes = func._schema.is_mutable or func is aten.native_batch_norm.default
        for one in _tensors([args, kwargs]) if changes else ():
            if _place(one) not in self._made:
                memory = one.untyped_storage()
                self._before.setdefault(_place(one), (memory, memory.clone()))
        outputs = func(*args, **kwargs)
        own = [(i, one) for i, one in enumerate(_tensors(outputs)) if _place(one) not in given]
        own = [] if func is aten.set_.source_Storage else own  # it was there before
        self._made |= {_place(one) for _, one in own}
        self.operations.append(Operation(func, args, kwargs, own))
        return outputs

    def restore(self) -> None:
        for memory, values in self._before.values():
            memory.copy_(values)


class RecordedGraphs(OneStream):
    """One stream, whose work can be captured; ``replays`` counts."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        with Capture() as recorded:
            work()
        recorded.restore()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                for one in recorded.operations:
                    one.replay()

        return replay


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _place(one: Tensor) -> int:
    return one.untyped_storage().data_ptr()
