"""The loop over a rank's row, and when its instructions ran, for a trace."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from stagewright.executor.programs.program import RECEIVES, SENDS, Instruction
from stagewright.executor.programs.trace import RankAction
from stagewright.executor.training.interpreter.agreement import Agreement
from stagewright.executor.training.interpreter.exchange import (
    RECV_B,
    RECV_F,
    Messages,
    StageExchange,
    Watchers,
)
from stagewright.executor.training.interpreter.graph import DeviceFactor
from stagewright.executor.training.interpreter.iterations import Iterations
from stagewright.executor.training.interpreter.last_stage import OutOfMemory, is_lack_of_memory
from stagewright.executor.training.ranks.rank import Rank, RankPlace
from stagewright.executor.training.stages.weights import Weights
from stagewright.executor.training.trace_recorder import waited_seconds
from stagewright.formulations.plans.actions import ON_DEVICE, Action, ActionKind

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I = ActionKind.INPUT_GRADIENT
REDUCE, UPDATE = ActionKind.REDUCE, ActionKind.UPDATE


Call = tuple[Instruction, Callable[[], None]]


def carry_out(
    calls: Iterable[Call],
    record: Callable[[Instruction, Callable[[], None]], None] | None,
    named: Callable[[Instruction], str],
    step: int,
) -> None:
    """Carry out the calls of a row in ``step``, by ``record`` where their times are wanted.

    Raises OutOfMemory with the instruction as ``named``, for any error that means a lack of memory.
    """
    for one, call in calls:
        try:
            if record is None:
                call()
            else:
                record(one, call)
        except (RuntimeError, MemoryError) as error:
            if not is_lack_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
            raise OutOfMemory(
                f"{named(one)} ran out of memory in step {step + 1}: {reason}"
            ) from error


class Recorder:
    """Carries out instructions and notes their times; threads watch the messages in flight.

    ``most``: the most messages that are in flight at one time. ``needed``: the receipts that a
    computation waits for.
    """

    def __init__(
        self,
        place: RankPlace,
        messages: Messages,
        most: int,
        needed: Callable[[Action], Iterable[Action]],
    ) -> None:
        self._place, self._messages, self._needed = place, messages, needed
        self._watchers = Watchers(place, most)

    def record(
        self,
        records: list[RankAction],
        one: Instruction,
        call: Callable[[], None],
        own_seconds: float = 0.0,
    ) -> None:
        """Carry out an instruction, which took ``own_seconds`` before, and note its times."""
        action, number = one.action, self._place.number
        self._record_arrivals(action, records)
        before = len(self._messages.sent_bytes(action))
        waited = waited_seconds() if action.kind in ON_DEVICE else None
        start = time.perf_counter() - own_seconds
        call()
        if action.kind in RECEIVES:
            arrival = self._messages.arrivals(action)[-1]
            arrival.arrived = self._watchers.watch(arrival.works)
        elif action.kind is not ActionKind.FREE:
            if self._place.device.type == "cuda":
                torch.cuda.synchronize(self._place.device)
            times, size = (start, time.perf_counter()), None
            if waited is not None:
                waited = (waited_seconds() or waited) - waited
            if action.kind in SENDS:
                size = float(sum(self._messages.sent_bytes(action)[before:]))
            records.append(RankAction(number, str(action), *times, one.peer, size, waited))

    def _record_arrivals(self, action: Action, records: list[RankAction]) -> None:
        """Wait for the values from other ranks that a computation needs."""
        for needed in self._needed(action):
            for arrival in self._messages.arrivals(needed):
                arrived = arrival.wait()
                if arrival.peer is not None:
                    times = (arrival.posted_seconds, arrived)
                    records.append(
                        RankAction(self._place.number, str(needed), *times, arrival.peer)
                    )


class PipelineRecorder(Recorder):
    """The recorder of a pipeline, where all-reduces are in flight as well.

    ``weights`` are by stage of this rank; ``groups``, by stage on several devices, are the
    processes that sum up its gradients.
    """

    def __init__(
        self,
        rank: Rank,
        iterations: Iterations,
        exchange: StageExchange,
        agreement: Agreement | DeviceFactor,
        weights: Mapping[int, Weights],
        groups: Mapping[int, dist.ProcessGroup],
        most: int,
    ) -> None:
        super().__init__(rank, exchange, most, _needed)
        self._iterations, self._agreement = iterations, agreement
        self._weights, self._groups = weights, groups
        self._reducing: dict[int, tuple[float, Callable[[], float]]] = {}

    def record(
        self,
        records: list[RankAction],
        one: Instruction,
        call: Callable[[], None],
        own_seconds: float = 0.0,
    ) -> None:
        """Carry out an instruction, and note its times and what an update waits for."""
        action = self._iterations.moved(one.action)
        if action.kind is REDUCE:
            start = time.perf_counter()
            call()
            works = self._weights[action.stage].reductions()
            self._reducing[action.stage] = (start, self._watchers.watch(works))
            return
        if action.kind is UPDATE:
            own_seconds = self._await_update(action, records)
        super().record(records, replace(one, action=action), call, own_seconds)

    def _await_update(self, action: Action, records: list[RankAction]) -> float:
        """Wait for the values that an update needs; return the seconds of computing in it."""
        s = action.stage
        if s in self._groups and s in self._reducing:  # else it is a part of the backwards
            since, reduced = self._reducing.pop(s)
            name, size = f"{s}{REDUCE}", float(self._weights[s].gradient_bytes)
            records.append(RankAction(self._place.number, name, since, reduced(), bytes=size))
        return self._agreement.wait(s)


def _needed(action: Action) -> Iterable[Action]:
    """The receipts that a computation waits for."""
    kind = {F: RECV_F, B: RECV_B, I: RECV_B}.get(action.kind)
    return () if kind is None else (Action(action.stage, kind, action.microbatch),)
