"""When the instructions of a rank ran, for a trace."""

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from stagewright.executor.programs.program import RECEIVES, SENDS, Instruction
from stagewright.executor.programs.trace import RankAction
from stagewright.executor.training.interpreter.agreement import Agreement
from stagewright.executor.training.interpreter.exchange import RECV_B, RECV_F, Exchange, Watchers
from stagewright.executor.training.interpreter.graph import DeviceFactor
from stagewright.executor.training.interpreter.iterations import Iterations
from stagewright.executor.training.ranks.rank import Rank
from stagewright.executor.training.stages.weights import Weights
from stagewright.executor.training.trace_recorder import waited_seconds
from stagewright.formulations.plans.actions import ON_DEVICE, Action, ActionKind

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I = ActionKind.INPUT_GRADIENT
REDUCE, UPDATE = ActionKind.REDUCE, ActionKind.UPDATE


class Recorder:
    """Carries out instructions and notes their times; threads watch the messages in flight.

    Parameters
    ----------
    messages
        The most messages that are in flight at one time.
    weights
        Per stage of this rank.
    groups
        Per stage on several devices, the processes that sum up its gradients.
    """

    def __init__(
        self,
        rank: Rank,
        iterations: Iterations,
        exchange: Exchange,
        agreement: Agreement | DeviceFactor,
        weights: Mapping[int, Weights],
        groups: Mapping[int, dist.ProcessGroup],
        messages: int,
    ) -> None:
        self._rank, self._iterations = rank, iterations
        self._exchange, self._agreement = exchange, agreement
        self._weights, self._groups = weights, groups
        self._watchers = Watchers(rank, messages)
        self._reducing: dict[int, tuple[float, Callable[[], float]]] = {}

    def record(self, one: Instruction, call: Callable[[], None], records: list[RankAction]) -> None:
        """Carry out an instruction and add its times to ``records``."""
        action, number = self._iterations.moved(one.action), self._rank.number
        self._record_arrivals(action, records)
        own_seconds = self._await_update(action, records) if action.kind is UPDATE else 0.0
        before = len(self._exchange.sent_bytes(action))
        waited = waited_seconds() if action.kind in ON_DEVICE else None
        start = time.perf_counter() - own_seconds
        call()
        if action.kind is REDUCE:
            works = self._weights[action.stage].reductions()
            self._reducing[action.stage] = (start, self._watchers.watch(works))
        elif action.kind in RECEIVES:
            arrival = self._exchange.arrivals(action)[-1]
            arrival.arrived = self._watchers.watch(arrival.works)
        else:
            if self._rank.device.type == "cuda":
                torch.cuda.synchronize(self._rank.device)
            times, size = (start, time.perf_counter()), None
            if waited is not None:
                waited = (waited_seconds() or waited) - waited
            if action.kind in SENDS:
                size = float(sum(self._exchange.sent_bytes(action)[before:]))
            records.append(RankAction(number, str(action), *times, one.peer, size, waited))

    def _record_arrivals(self, action: Action, records: list[RankAction]) -> None:
        """Wait for the values from other ranks that a computation needs."""
        needed = _needed(action)
        for arrival in self._exchange.arrivals(needed) if needed else ():
            arrived = arrival.wait()
            if arrival.peer is not None:
                times = (arrival.posted_seconds, arrived)
                records.append(RankAction(self._rank.number, str(needed), *times, arrival.peer))

    def _await_update(self, action: Action, records: list[RankAction]) -> float:
        """Wait for the values that an update needs; return the seconds of computing in it."""
        s = action.stage
        if s in self._groups and s in self._reducing:  # else it is a part of the backwards
            since, reduced = self._reducing.pop(s)
            name, size = f"{s}{REDUCE}", float(self._weights[s].gradient_bytes)
            records.append(RankAction(self._rank.number, name, since, reduced(), bytes=size))
        return self._agreement.wait(s)


def _needed(action: Action) -> Action | None:
    """The arrivals that a computation waits for."""
    kind = {F: RECV_F, B: RECV_B, I: RECV_B}.get(action.kind)
    return None if kind is None else Action(action.stage, kind, action.microbatch)
