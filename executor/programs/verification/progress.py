"""Proof that every rank of a pipeline's program reaches the end of its row."""

from collections.abc import Iterator

from stagewright.executor.programs.memory import RowProgress
from stagewright.executor.programs.program import (
    Instruction,
    Program,
    ProgramWork,
    handed,
    received,
    stages_on,
)
from stagewright.formulations.plans.actions import COMPUTE, Action, ActionKind
from stagewright.formulations.plans.shards import mates

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD
REDUCE, UPDATE = ActionKind.REDUCE, ActionKind.UPDATE


class PipelineProgress(RowProgress):
    """Progress of a pipeline's program: the conditions that instructions wait for."""

    def __init__(self, work: ProgramWork, program: Program) -> None:
        super().__init__(program)
        self.work, self.plan = work, work.plan
        self.rank = {name: r for r, name in enumerate(program.devices)}

    def _awaited(self, rank: int, action: Action) -> Iterator[tuple[int, str]]:
        """The actions that an action still waits for, with the rank of each."""
        s, m, kind = action.stage, action.microbatch, action.kind
        yield from self._others(rank, action)
        if kind is F and s > 0:
            yield from self._arrivals(rank, Action(s - 1, SEND_F, m), (F,))
        elif kind in (B, I):
            yield from self._own(rank, s, (F,), m)
            yield from self._gradients(rank, s, m)
        elif kind is W:
            yield from self._own(rank, s, (I,), m)
        elif kind is SEND_F:
            yield from self._own(rank, s, (F,), m)
        elif kind is SEND_B:
            yield from self._own(rank, s, (B, I), m)
        elif kind is UPDATE:
            yield from self._reductions(rank, s)

    def _others(self, rank: int, action: Action) -> Iterator[tuple[int, str]]:
        """The ranks that a rank waits for besides transfers: partners in collectives."""
        if self.work.is_measured:
            yield from self._measured(rank)
        stage = self.plan.stages[action.stage]
        if action.kind in (*COMPUTE, UPDATE):
            yield from self._mates(rank, action, stage.joint(action.kind))

    def _mates(self, rank: int, action: Action, size: int) -> Iterator[tuple[int, str]]:
        """The ``size`` partners in an action's collectives that have not reached the action yet."""
        stage, device = self.plan.stages[action.stage], self.program.devices[rank]
        for peer in (self.rank[name] for name in mates(stage, device, size)):
            row, at = self.program.rows[peer], self.at[peer]
            there = row[at].action if at < len(row) else None
            if there != action and not self.done[peer][action]:
                yield peer, str(action)

    def _own(
        self, rank: int, s: int, kinds: tuple[ActionKind, ...], m: int | None
    ) -> Iterator[tuple[int, str]]:
        if not any(self.done[rank][Action(s, kind, m)] for kind in kinds):
            yield rank, f"{s}{kinds[0]}{m}"

    def _arrivals(
        self, rank: int, send: Action, makers: tuple[ActionKind, ...]
    ) -> Iterator[tuple[int, str]]:
        assert send.microbatch is not None
        device, there = self.program.devices[rank], received(send)
        senders = [v for v, target in handed(self.plan, send) if target == device]
        if device in senders:  # its own share, without a transfer
            yield from self._own(rank, send.stage, makers, send.microbatch)
        for sender in senders:
            if sender == device:
                continue
            peer = self.rank[sender]
            receive = Instruction(there, peer)
            yield from self._unfinished(rank, receive, Instruction(send, rank))

    def _reductions(self, rank: int, s: int) -> Iterator[tuple[int, str]]:
        for other, name in self.work.brings(s):
            peer = self.rank[name]
            if self.done[peer][Action(other, REDUCE)] <= self.done[rank][Action(s, UPDATE)]:
                yield peer, f"{other}{REDUCE}"

    def _gradients(self, rank: int, s: int, m: int | None) -> Iterator[tuple[int, str]]:
        """The inputs of a backward: gradients of the next stage, or losses normalised together.

        Losses are normalised over a microbatch where each has its own update. Where there is one
        update in an iteration, its losses are known before any stage has ended its backwards.
        """
        if s < len(self.plan.stages) - 1:
            yield from self._arrivals(rank, Action(s + 1, SEND_B, m), (B, I))
        elif self.plan.weight_rule.updates_every_round:
            assert m is not None
            for name in self.plan.runners(s, m):
                yield from self._own(self.rank[name], s, (F,), m)

    def _measured(self, rank: int) -> Iterator[tuple[int, str]]:
        """The all-reduces whose results a rank measures, when it has begun its last one."""
        row, at = self.program.rows[rank], self.at[rank]
        if at == 0 or row[at - 1].action.kind is not REDUCE:
            return
        own = stages_on(self.plan, self.program.devices[rank])
        begun = {self.done[rank][Action(s, REDUCE)] for s in own}
        for s in own if len(begun) == 1 else ():
            for name in self.plan.stages[s].devices:
                if self.done[self.rank[name]][Action(s, REDUCE)] < min(begun):
                    yield self.rank[name], f"{s}{REDUCE}"
