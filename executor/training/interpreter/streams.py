"""The main stream of a rank, which has priority, and its sub-stream; windows as graphs.

The interpreter says what runs in the sub-stream and which instruction waits for which; an
implementation carries that out. On a CPU there is one stream, and nothing has to be said.

A window between two losses is a graph, which the GPU replays without the host. It reads and writes
the same memory in every replay. The mini-batch is copied into it before.
What the next window takes over from this one (what forwards kept for backwards, the gradients of
the losses, and the factor of updates) is copied, at the end of the graph, to where its beginning
reads it. So the host's state stays that of the window that was captured.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.executor.programs.program import Row, waits
from stagewright.executor.training.interpreter.last_stage import Iterations, LastStage
from stagewright.executor.training.losses import LossScale
from stagewright.executor.training.stages.stage import StageComputation
from stagewright.executor.training.stages.weights import TiedSums, Weights
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


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """Sums over ranks that an update needs.

    ``group`` are the processes that sum up the counts of losses, None for one alone: all of them,
    or those of a split last stage where every microbatch has its own update. ``stages`` are updated
    together, at the end of an iteration. ``sum_tied`` sums up the gradients of parameters that
    stages share; ``tied`` does so while the next gradients are computed.
    ``squares`` is this rank's part of the squared norm of all gradients. An update is by the
    gradients of ``accumulate`` mini-batches; ``counted`` are the counts of those so far. With a
    ``loss_scale`` an update is left out if a gradient is not finite.
    """

    group: dist.ProcessGroup | None
    stages: frozenset[int]
    sum_tied: Callable[[], None]
    squares: Callable[[], float]
    clip_norm: float = inf
    tied: TiedSums | None = None
    accumulate: int = 1
    counted: list[Tensor | None] = field(default_factory=list)
    loss_scale: LossScale | None = None

    @property
    def measures(self) -> bool:
        """Whether an update depends on the norm of all gradients."""
        return self.clip_norm < inf or self.loss_scale is not None


class DeviceFactor:
    """The factor of the updates of a rank alone: as `Agreement`, but the host never reads it."""

    def __init__(self, iterations: Iterations, last_stage: LastStage, last: int) -> None:
        self._last_stage, self._losses = last_stage, iterations.runs_of(last)
        self._missing = 0
        self._factor: Tensor | None = None

    def begin(self, iteration: int, *, updates: bool) -> None:
        """Wait for an iteration's losses; all have ``updates``."""
        self._missing = self._losses

    def loss_computed(self, iteration: int) -> None:
        """Count a loss; with the last one of an iteration its factor is known."""
        self._missing -= 1
        if self._missing == 0:
            counts = [one for one in self._last_stage.counts(iteration) if one is not None]
            self._factor = 1 / torch.stack(counts).double().sum() if counts else None

    def reduced(self, s: int) -> None:
        """A stage of one device has no all-reduce."""

    def pop_factor(self, s: int) -> float | Tensor | None:
        """The factor for the gradients of the stage's next update."""
        return 1.0 if self._factor is None else self._factor

    def held(self) -> list[Tensor]:
        """Tensors that the next window reads."""
        return [] if self._factor is None else [self._factor]

    def wait(self, s: int) -> float:
        """Wait for nothing, since a rank alone needs no other ranks; the seconds of computing."""
        return 0.0

    def restart(self) -> None:
        """Do nothing: no count goes from one iteration to the next."""


class CapturedWindow:
    """A window that was captured with the mini-batch ``given``, and is replayed with others.

    ``work`` carries the window out; ``held`` lists what the next window takes over, in one order.
    """

    def __init__(
        self,
        streams: DeviceStreams,
        work: Callable[[], None],
        held: Callable[[], list[Tensor]],
        given: Sequence[Tensor],
        weights: Iterable[Weights],
    ) -> None:
        before, self._given, self._weights = held(), given, list(weights)
        self._settings = self._now()

        def whole() -> None:
            work()
            for old, new in _moved(before, held()):
                old.copy_(new, non_blocking=True)

        self._before = before  # the graph reads its memory
        self._replay = streams.capture(whole)

    def is_valid(self) -> bool:
        """Whether optimizers have the settings, learning rates among them, that are captured."""
        return self._now() == self._settings

    def run(self, given: Sequence[Tensor]) -> None:
        """Carry out the window with a mini-batch."""
        for place, one in zip(self._given, given, strict=True):
            place.copy_(one, non_blocking=True)
        self._replay()

    def _now(self) -> list[dict[str, object]]:
        optimizers = (one.optimizer for one in self._weights if one.optimizer is not None)
        groups = (group for one in optimizers for group in one.param_groups)
        return [
            {key: value for key, value in group.items() if isinstance(value, float | int | tuple)}
            for group in groups
        ]


def held_by(computations: Mapping[int, StageComputation], last: LastStage) -> list[Tensor]:
    """Tensors that forwards and losses have kept for backwards."""
    return [one for s in sorted(computations) for one in computations[s].held()] + last.held()


def _moved(
    before: Sequence[Tensor], after: Sequence[Tensor]
) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
    """The memory of tensors that are in other places now: each place once."""
    pairs = zip(before, after, strict=True)
    found = {
        old.untyped_storage().data_ptr(): (old.untyped_storage(), new.untyped_storage())
        for old, new in pairs
    }
    return [(old, new) for place, (old, new) in found.items() if place != new.data_ptr()]
