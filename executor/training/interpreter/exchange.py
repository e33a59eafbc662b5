"""The exchange of values between the stages of a rank and those of others.

Sends and receives are asynchronous: a computation waits for what it needs and for nothing else.
"""

import math
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.executor.capture.shapes import Value
from stagewright.executor.programs.program import SENDS, handed, received, transfers
from stagewright.executor.training.interpreter.last_stage import Iterations
from stagewright.executor.training.ranks.rank import Rank, RankPlace
from stagewright.executor.training.stages.stage import Gradients
from stagewright.formulations.plans.actions import SEND_B, SEND_F, Action, ActionKind


class Watchers:
    """Threads for up to ``messages`` that are in flight at one time."""

    def __init__(self, place: RankPlace, messages: int) -> None:
        self._place = place
        self._threads = ThreadPoolExecutor(messages)  # they start when they are needed

    def watch(self, works: Sequence[dist.Work]) -> Callable[[], float]:
        """A function that returns when ``works`` were done.

        With gloo, only a thread that waits for a message knows its time. With NCCL, a wait belongs
        to the stream of this thread, which waits itself when it has to.
        """
        if self._place.wire.type == "cpu":
            return self._threads.submit(waited, works).result

        def synchronized() -> float:
            waited(works)
            torch.cuda.synchronize(self._place.device)
            return time.perf_counter()

        return synchronized


@dataclass(slots=True)
class Arrival:
    """Values that a computation needs; ``peer`` is None if they come from this rank itself."""

    lane: int
    values: list[Tensor | None]
    peer: int | None = None
    works: tuple[dist.Work, ...] = ()
    posted_seconds: float = 0.0
    arrived: Callable[[], float] | None = None

    def wait(self) -> float:
        """Wait until it has arrived; its time, if a thread watches it, else now.

        Each receive is waited for once: with gloo, a second wait would be for another message.
        """
        if self.arrived is not None:
            return self.arrived()
        seconds = waited(self.works)
        self.works = ()
        return seconds


def waited(works: Sequence[dist.Work]) -> float:
    """Wait for all of ``works``; the time when they were done."""
    for work in works:
        work.wait()
    return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Boundary:
    """The values between two stages: ``values`` of a whole microbatch.

    ``cut[a][b]`` is the range of sender a's samples that receiver b gets, None if both stages run
    on the same devices, so that each keeps its samples. ``by_sample`` says of each value whether
    its first dimension is the samples; other values are never cut.
    """

    values: tuple[Value, ...]
    by_sample: tuple[bool, ...]
    cut: list[list[tuple[int, int]]] | None

    def passing(self, below: int, above: int, *, in_receiver: bool) -> tuple[int, int]:
        """The samples that pass from lane ``below`` to ``above``, in the numbers of either."""
        assert self.cut is not None
        start, stop = self.cut[below][above]
        if not in_receiver:
            return start, stop
        before = sum(row[above][1] - row[above][0] for row in self.cut[:below])
        return before, before + stop - start

    def part(self, values: Sequence[Tensor | None], start: int, stop: int) -> list[Tensor | None]:
        """``values`` of the samples [start, stop)."""
        return [
            one[start:stop] if one is not None and cut else one
            for one, cut in zip(values, self.by_sample, strict=True)
        ]

    def shape(self, i: int, samples: int) -> tuple[int, ...]:
        """The shape of value ``i`` for that many samples."""
        shape = self.values[i].shape
        return (samples, *shape[1:]) if self.by_sample[i] else shape

    def joined(self, parts: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """Values joined from the samples in ``parts``."""
        if len(parts) == 1:
            return list(parts[0])
        return [
            torch.cat(pieces) if cut and pieces[0] is not None else pieces[0]
            for cut, pieces in zip(self.by_sample, zip(*parts, strict=True), strict=True)
        ]


Layout = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""

_ALIGNED = 64  # bytes, as kernels expect of a tensor's memory


def message_of(layouts: Sequence[Layout], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Memory of one message for several tensors, and these tensors.

    One message costs ranks the time of one, however many tensors pass between their stages.
    """
    spans, stop = [], 0
    for shape, dtype in layouts:
        start = -(-stop // _ALIGNED) * _ALIGNED
        stop = start + math.prod(shape) * dtype.itemsize
        spans.append(slice(start, stop))
    message = torch.empty(stop, dtype=torch.uint8, device=device)
    pairs = zip(spans, layouts, strict=True)
    return message, [message[span].view(dtype).view(shape) for span, (shape, dtype) in pairs]


def schedule_gloo(policy: int) -> None:
    """Schedule gloo's threads by ``policy``: by SCHED_BATCH they interrupt no other thread.

    A thread of gloo polls for the lock of its connection. Where it has interrupted the thread that
    holds the lock, in the middle of a send, it polls for its whole slice of the core.
    """
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended, or the system refuses
            if (task / "comm").read_text().startswith("gloo"):
                os.sched_setscheduler(int(task.name), policy, os.sched_param(0))


class Messages:
    """The messages of a rank in flight: received under the receiver's action, sent under the SEND.

    They are asynchronous; what is sent is kept until it has been. Between CPUs, gloo's threads have
    the core before each message, so that none waits for the lock that a message takes.
    """

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        is_by_gloo = place.group is not None and place.wire.type == "cpu"
        self._yields = is_by_gloo and sys.platform == "linux"
        if self._yields:
            schedule_gloo(os.SCHED_BATCH)
        self._arrivals: defaultdict[Action, list[Arrival]] = defaultdict(list)
        self._sent: defaultdict[Action, list[tuple[dist.Work, Tensor]]] = defaultdict(list)

    def post(self, action: Action, value: Tensor, peer: int, tag: int) -> None:
        """Send a tensor on the device of messages to ``peer``."""
        group = self._turn()
        self._sent[action].append((group.send([value], peer, tag), value))

    def expect(
        self,
        action: Action,
        message: Tensor,
        values: list[Tensor | None],
        peer: int,
        tag: int,
        lane: int = 0,
    ) -> None:
        """Receive ``message`` from ``peer``, unless it is empty; ``values`` are in its memory."""
        group, posted = self._turn(), time.perf_counter()
        works = (group.recv([message], peer, tag),) if len(message) else ()
        self._arrivals[action].append(Arrival(lane, values, peer, works, posted))

    def _turn(self) -> dist.ProcessGroup:
        """Give gloo's threads the core, if they wait for it; the group of the next message."""
        if self._yields:
            os.sched_yield()
        assert self._place.group is not None
        return self._place.group

    def arrivals(self, action: Action) -> Sequence[Arrival]:
        """Values that ``action`` has received and that have not been taken yet."""
        return self._arrivals.get(action, ())

    def taken(self, action: Action) -> list[Arrival]:
        """Wait for what ``action`` receives and take it, by lanes."""
        found = sorted(self._arrivals.pop(action, ()), key=lambda one: one.lane)
        for arrival in found:
            arrival.wait()
        return found

    def sent_bytes(self, action: Action) -> list[int]:
        """The sizes of the messages of a send that have not been released yet."""
        return [value.nbytes for _, value in self._sent.get(action, ())]

    def release(self, action: Action) -> None:
        """Wait for a send and release the sent tensors."""
        for work, _ in self._sent.pop(action, ()):
            work.wait()


RECV_F, RECV_B = ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD


@dataclass(slots=True)
class _Outgoing:
    """Values that a computation made for other ranks, and the number of sends to come."""

    values: Sequence[Tensor | None]
    sends: int


class StageExchange(Messages):
    """Values that leave and arrive on a rank.

    ``boundaries``: Boundary s lies between stages s and s + 1. ``stages``: the stages of this rank.
    """

    def __init__(
        self,
        rank: Rank,
        iterations: Iterations,
        boundaries: Sequence[Boundary],
        stages: Collection[int],
    ) -> None:
        super().__init__(rank)
        self._rank, self._iterations, self._boundaries = rank, iterations, boundaries
        self._count = iterations.count
        self._sends = self._count_sends(stages)
        self._outgoing: dict[Action, _Outgoing] = {}
        self._older_sends: list[Action] = []

    def _count_sends(self, stages: Collection[int]) -> Counter[tuple[int, ActionKind, int]]:
        """Per stage, kind, and microbatch of an iteration: the ranks to which this one sends."""
        me, steps = self._rank.name, ((SEND_F, 1), (SEND_B, -1))
        return Counter(
            (s, kind, m)
            for s in stages
            for kind, way in steps
            for m in range(self._count if 0 <= s + way <= len(self._boundaries) else 0)
            for sender, _ in transfers(self._rank.plan, Action(s, kind, m))
            if sender == me
        )

    # Sends and receives as calls

    def transfer(self, action: Action, peer: int) -> Callable[[], None]:
        """A send or receive: which part of which values, under which tags.

        Both ranks number the values of an iteration's microbatches and directions alike, and see
        those of the same number in one order.
        """
        s, m = action.stage, action.microbatch
        assert m is not None
        forth = action.kind in (SEND_F, RECV_F)
        lower = s if action.kind in (SEND_F, RECV_B) else s - 1
        boundary = self._boundaries[lower]
        mine = self._rank.lane(self._rank.number, s, m)
        theirs = self._rank.lane(peer, 2 * lower + 1 - s, m)
        below, above = (mine, theirs) if s == lower else (theirs, mine)
        span = boundary.passing(below, above, in_receiver=s != lower)
        chosen = [i for i, value in enumerate(boundary.values) if forth or value.gradient]
        layouts = [(boundary.shape(i, span[1] - span[0]), boundary.values[i].dtype) for i in chosen]
        tag = 2 * (lower * self._count + m % self._count) + forth
        if action.kind in SENDS:
            return partial(self._send, action, peer, boundary, span, chosen, layouts, tag)
        return partial(self._receive, action, peer, theirs, chosen, layouts, tag)

    def _send(
        self,
        action: Action,
        peer: int,
        boundary: Boundary,
        span: tuple[int, int],
        chosen: Sequence[int],
        layouts: Sequence[Layout],
        tag: int,
    ) -> None:
        action = self._iterations.moved(action)
        outgoing = self._outgoing[action]
        outgoing.sends -= 1
        if outgoing.sends == 0:
            del self._outgoing[action]
        values = boundary.part(outgoing.values, *span)
        given = [one.detach() for i in chosen if (one := values[i]) is not None]
        assert len(given) == len(chosen)
        if len(given) == 1:
            whole = given[0].to(self._rank.wire).contiguous()
            message = whole.view(-1).view(torch.uint8)
        else:
            message, rooms = message_of(layouts, self._rank.wire)
            for room, one in zip(rooms, given, strict=True):
                room.copy_(one)
        if len(message):
            self.post(action, message, peer, tag)

    def _receive(
        self,
        action: Action,
        peer: int,
        lane: int,
        chosen: Sequence[int],
        layouts: Sequence[Layout],
        tag: int,
    ) -> None:
        lower = action.stage if action.kind is RECV_B else action.stage - 1
        values: list[Tensor | None] = [None] * len(self._boundaries[lower].values)
        message, rooms = message_of(layouts, self._rank.wire)
        for i, room in zip(chosen, rooms, strict=True):
            values[i] = room
        self.expect(self._iterations.moved(action), message, values, peer, tag, lane)

    # Values of computations

    def give(self, action: Action, values: Sequence[Tensor | None]) -> None:
        """Keep ``values`` for the sends to come, and hand this rank its own part of them."""
        there, m = received(action), action.microbatch
        assert m is not None
        sends = self._sends[action.stage, action.kind, m % self._count]
        if sends:
            self._outgoing[action] = _Outgoing(values, sends)
        if (self._rank.name, self._rank.name) not in handed(self._rank.plan, action):
            return
        number = self._rank.number
        mine, ahead = (self._rank.lane(number, s, m) for s in (action.stage, there.stage))
        boundary = self._boundaries[min(action.stage, there.stage)]
        if boundary.cut is not None:
            back = action.kind is SEND_B
            below, above = (ahead, mine) if back else (mine, ahead)
            values = boundary.part(values, *boundary.passing(below, above, in_receiver=back))
        self._arrivals[there].append(Arrival(mine, list(values)))

    def give_back(self, s: int, m: int, gradients: Gradients) -> None:
        """Give the gradients of the inputs of stage ``s`` to the stage before it."""
        if s == 0:
            return
        boundary = self._boundaries[s - 1]
        samples = round(self._iterations.share(s, m) * self._iterations.samples)
        # The sender of an input that nothing used still waits for a gradient.
        filled = [
            torch.zeros(boundary.shape(i, samples), dtype=value.dtype, device=self._rank.device)
            if value.gradient and one is None
            else one
            for i, (value, one) in enumerate(zip(boundary.values, gradients, strict=True))
        ]
        self.give(Action(s, SEND_B, m), filled)

    def take(self, action: Action) -> tuple[Any, ...]:
        """The values that have arrived for a computation, samples in the senders' order.

        A forward's values are all there; of gradients some may be None.
        """
        arrivals = self.taken(action)
        lower = action.stage if action.kind is RECV_B else action.stage - 1
        values = self._boundaries[lower].joined([one.values for one in arrivals])
        if self._rank.wire != self._rank.device:
            values = [one if one is None else one.to(self._rank.device) for one in values]
        return tuple(values)

    def release_older(self) -> None:
        """Release the sends of the iteration before."""
        for action in self._older_sends:
            self.release(action)
        self._older_sends = list(self._sent)

    def release_all(self) -> None:
        """Release all sends."""
        for action in list(self._sent):
            self.release(action)
        self._older_sends.clear()
