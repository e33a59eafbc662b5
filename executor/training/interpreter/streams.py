"""The two streams of a rank: the main stream, which has priority, and the sub-stream.

The interpreter says what runs in the sub-stream and which instruction waits for which; an
implementation carries that out. On a CPU there is one stream, and nothing has to be said.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from stagewright.executor.programs.program import Row, waits
from stagewright.graphs.documents.errors import InputError


class DeviceStreams(Protocol):
    """Two streams; an event is the position of an instruction in its row."""

    def main(self) -> AbstractContextManager[None]:
        """Run in the main stream, after what came before; what follows comes after all of it."""

    def sub(self) -> AbstractContextManager[None]:
        """Run in the sub-stream."""

    def record(self, event: int) -> None:
        """The event is when all that runs in the current stream so far is done."""

    def wait(self, event: int) -> None:
        """Let the current stream wait for an event."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Use the memory of ``tensors`` for nothing else until the current stream is done with it.

        Needed for those that the other stream made.
        """

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record ``work`` without doing it; the function that is returned does it each time."""


class OneStream:
    """No streams: everything runs where it is called, one after another."""

    def main(self) -> AbstractContextManager[None]:
        """Do nothing: all work runs in one stream."""
        return nullcontext()

    def sub(self) -> AbstractContextManager[None]:
        """Do nothing: all work runs in one stream."""
        return nullcontext()

    def record(self, event: int) -> None:
        """Do nothing: all work runs in one stream."""

    def wait(self, event: int) -> None:
        """Do nothing: all work runs in one stream."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing: all work runs in one stream."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Refuse to capture a window, which only a GPU can."""
        raise InputError("a window is captured on a GPU only")


class CudaStreams:
    """Streams of a GPU; lower numbers have priority, and 0 is the lowest."""

    def __init__(self, device: torch.device) -> None:
        self._main = torch.cuda.Stream(device, priority=-1)
        self._sub = torch.cuda.Stream(device, priority=0)
        self._events: dict[int, torch.cuda.Event] = {}

    @contextmanager
    def main(self) -> Iterator[None]:
        """Run in the main stream, after what came before; what follows comes after all of it."""
        outside = torch.cuda.current_stream(self._main.device)
        self._main.wait_stream(outside)
        with torch.cuda.stream(self._main):
            yield
        outside.wait_stream(self._main)

    def sub(self) -> AbstractContextManager[None]:
        """Run in the sub-stream."""
        return torch.cuda.stream(self._sub)

    def record(self, event: int) -> None:
        """The event is when all that runs in the current stream so far is done."""
        self._events.setdefault(event, torch.cuda.Event()).record()

    def wait(self, event: int) -> None:
        """Let the current stream wait for an event."""
        self._events[event].wait()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Tell the allocator that tensors are used in another stream than they were made in."""
        for one in tensors:
            one.record_stream(torch.cuda.current_stream(one.device))

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record ``work`` as a CUDA graph, which is launched in the main stream."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._main):
            work()

        def replay() -> None:
            with self.main():
                graph.replay()

        return replay


def make_streams(device: torch.device) -> DeviceStreams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else OneStream()


def in_streams(
    row: Row, calls: Iterable[Callable[[], None]], streams: DeviceStreams
) -> Iterator[Callable[[], None]]:
    """The ``calls`` of a row, each in its stream and after the instruction that it waits for."""
    events = waits(row)
    for i, (one, call, awaited) in enumerate(zip(row, calls, events, strict=True)):
        is_awaited = i in events
        if one.stream is None and awaited is None and not is_awaited:
            yield call
        else:
            event = i if is_awaited else None
            yield _in_stream(call, streams, awaited, event, is_sub=one.stream is not None)


def _in_stream(
    call: Callable[[], None],
    streams: DeviceStreams,
    awaited: int | None,
    event: int | None,
    *,
    is_sub: bool,
) -> Callable[[], None]:
    def issue() -> None:
        with streams.sub() if is_sub else nullcontext():
            if awaited is not None:
                streams.wait(awaited)
            call()
            if event is not None:
                streams.record(event)

    return issue
