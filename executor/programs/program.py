"""A program per rank: the instructions that carry out one training iteration of a plan.

A program prints and parses as text, a line per rank: ``0F0,0SEND_F0>1,0RECV_B0<1,0B0,0UPDATE``.
``>1`` is sent to rank 1, ``<1`` is received from it; ``1W0@sub`` runs in the rank's sub-stream.

Its work is known from the plan alone. A replicated stage (split) passes values on as in SPP, figure
3: each of k senders cuts its samples into as many pieces as there are receivers, and every receiver
takes a piece from each sender. So every link carries the same share, as in the cost model, and the
order of the samples changes from stage to stage.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from stagewright.formulations.plans.actions import (
    REDUCE,
    UPDATE,
    VERSIONED,
    Action,
    ActionKind,
    B,
    I,
    W,
)
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.shards import pairs, share_count, stays
from stagewright.graphs.documents.errors import InputError, InvalidPlan

SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD, ActionKind.SEND_OUTPUT)
RECEIVES = (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD, ActionKind.RECEIVE_OUTPUT)


@dataclass(frozen=True, slots=True)
class Instruction:
    """An action of one rank; ``peer`` is the other rank of a transfer.

    ``stream`` is that of the plan: None for the main stream.
    """

    action: Action
    peer: int | None = None
    stream: Literal["sub"] | None = None

    def __post_init__(self) -> None:
        if (self.peer is None) == (self.action.kind in SENDS + RECEIVES):
            raise InputError(f"{self.action}: a peer belongs to transfers, and only to them")
        if self.stream is not None and self.action.kind not in (W, ActionKind.REDUCE):
            raise InputError(
                f"{self.action}: only weight gradients and their all-reduces can be in a sub-stream"
            )

    def __str__(self) -> str:
        if self.stream is not None:
            return f"{self.action}@{self.stream}"
        if self.peer is None:
            return str(self.action)
        return f"{self.action}{'>' if self.action.kind in SENDS else '<'}{self.peer}"


Row = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Per rank its instructions in order; rank r is ``devices[r]`` of the plan."""

    devices: tuple[str, ...]
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, row)) for row in self.rows)


ProgramRows = tuple[Row, ...]
Rows = list[list[Instruction]]
"""Per rank its instructions, while passes still add to them."""

Families = Collection[frozenset[int]]
"""Sets of stages that have a parameter in common."""


@dataclass(frozen=True, slots=True)
class PeriodicProgram:
    """The rows of each iteration of a plan that spans steps, and of the drain after the last one.

    In its first iterations the pipeline fills: iteration i does ``segments[i]``. The last of them
    repeats: an iteration later, its microbatches are higher by ``microbatches`` and its versions of
    the weights by ``updates``. ``drains[i]`` completes the microbatches in flight after
    ``segments[i]``; the last repeats likewise. Both hold a row per rank. Microbatches and versions
    are counted from the last empty pipeline; ``microbatches`` and ``updates`` are those of an
    iteration.
    """

    devices: tuple[str, ...]
    microbatches: int
    segments: tuple[ProgramRows, ...]
    drains: tuple[ProgramRows, ...]
    updates: int = 1

    def place(self, iteration: int) -> tuple[int, int]:
        """The index of an iteration's segment and drain, and by how many iterations they shift."""
        position = min(iteration, len(self.segments) - 1)
        return position, iteration - position

    def segment(self, iteration: int) -> ProgramRows:
        """The rows of an iteration."""
        position, later = self.place(iteration)
        return tuple(self._moved(row, later) for row in self.segments[position])

    def drain(self, iterations: int) -> ProgramRows:
        """The rows of the drain after so many iterations."""
        position, later = self.place(iterations - 1)
        return tuple(self._moved(row, later) for row in self.drains[position])

    def unrolled(self, iterations: int) -> Program:
        """The program of so many iterations, from an empty pipeline to an empty one."""
        parts = [*map(self.segment, range(iterations)), self.drain(iterations)]
        rows = (tuple(one for row in part for one in row) for part in zip(*parts, strict=True))
        return Program(self.devices, tuple(rows))

    def until_it_repeats(self) -> Program:
        """Enough iterations to contain every state of the pipeline."""
        return self.unrolled(len(self.segments) + 1)

    def _moved(self, row: Row, later: int) -> Row:
        return tuple(moved(one, later, self.microbatches, self.updates) for one in row)


def moved(one: Instruction, later: int, microbatches: int, updates: int = 1) -> Instruction:
    """The instruction shifted by ``later`` iterations of ``microbatches`` microbatches each."""
    action = moved_action(one.action, later, microbatches, updates)
    return one if action is one.action else replace(one, action=action)


def moved_action(action: Action, later: int, microbatches: int, updates: int = 1) -> Action:
    """The same for an action: a later microbatch, or a later version of the weights."""
    if action.microbatch is None or later == 0:
        return action
    each = updates if action.kind in VERSIONED else microbatches
    return Action(action.stage, action.kind, action.microbatch + later * each)


def plan_devices(plan: PipelinePlan) -> tuple[str, ...]:
    """The devices that the plan uses, by rank: in the order in which the stages name them."""
    return tuple(dict.fromkeys(name for stage in plan.stages for name in stage.devices))


def updates_of_iteration(plan: PipelinePlan) -> int:
    """How often the weights of a periodic plan change in an iteration."""
    return plan.microbatches if plan.weight_rule.updates_every_round else 1


def stages_on(plan: PipelinePlan, device: str) -> list[int]:
    """The stages that run on ``device``."""
    return [s for s, stage in enumerate(plan.stages) if device in stage.devices]


def handed(plan: PipelinePlan, action: Action) -> Iterator[tuple[str, str]]:
    """The pairs (sender, receiver) of devices of a SEND of ``plan``, also of a device with itself.

    Equal groups keep their shares.
    """
    assert action.microbatch is not None
    there = action.stage + (1 if action.kind is ActionKind.SEND_FORWARD else -1)
    m = action.microbatch % plan.microbatches
    return pairs(plan.stages[action.stage], plan.stages[there], m)


def transfers(plan: PipelinePlan, action: Action) -> Iterator[tuple[str, str]]:
    """The pairs (sender, receiver) of different devices of a SEND of ``plan``.

    Values that stay on a device are no transfer.
    """
    return ((sender, receiver) for sender, receiver in handed(plan, action) if sender != receiver)


def received(action: Action) -> Action:
    """The receiver's action for a SEND.

    Examples
    --------
    >>> str(received(parse_action("2SEND_F0"))), str(received(parse_action("2SEND_B0")))
    ('3RECV_F0', '1RECV_B0')
    """
    if action.kind is ActionKind.SEND_OUTPUT:
        return replace(action, kind=ActionKind.RECEIVE_OUTPUT)
    if action.kind is ActionKind.SEND_FORWARD:
        return Action(action.stage + 1, ActionKind.RECEIVE_FORWARD, action.microbatch)
    return Action(action.stage - 1, ActionKind.RECEIVE_BACKWARD, action.microbatch)


_Datum = tuple[str, int, int | None]


def waits(row: Row) -> tuple[int | None, ...]:
    """The position, in the other stream, of the instruction that each instruction waits for.

    A stream runs its instructions in order, so the latest one that touches the same data stands for
    all before it. An instruction waits for nothing if its stream has waited for as much before.
    """
    latest: dict[tuple[bool, _Datum], int] = {}
    reached = {True: -1, False: -1}  # per stream, the position in the other that it waited for
    found: list[int | None] = []
    for i, one in enumerate(row):
        in_sub = one.stream is not None
        data = tuple(touched(one.action))
        needed = max((latest.get((not in_sub, datum), -1) for datum in data), default=-1)
        found.append(needed if needed > reached[in_sub] else None)
        reached[in_sub] = max(reached[in_sub], needed)
        latest |= dict.fromkeys(((in_sub, datum) for datum in data), i)
    return tuple(found)


def touched(action: Action) -> Iterator[_Datum]:
    """The data that an action shares with actions of the other stream and that one changes.

    Forwards touch nothing of it: they follow the update of their stage, in the same stream.
    """
    if action.kind in (I, W):
        yield "handed over", action.stage, action.microbatch
    if action.kind in (B, W, REDUCE, UPDATE):
        yield "gradients", action.stage, None


Samples = tuple[int, ...]  # of a microbatch, by their places in it


def rows(plan: PipelinePlan, samples: int) -> tuple[tuple[Samples, ...], ...]:
    """Per stage and group of ``stage.runners(m)``: the samples of a microbatch, in its order.

    Groups are single devices at tensor degree 1. Raises InputError if a stage splits a microbatch
    among more groups than it has samples.
    """
    found: list[tuple[Samples, ...]] = []
    for s, stage in enumerate(plan.stages):
        if not found:
            whole = [tuple(range(samples))]
            lanes = _dealt(whole, share_count(stage))
        elif stays(plan.stages[s - 1], stage, 0):
            lanes = found[-1]
        else:
            lanes = _dealt(found[-1], share_count(stage))
        if not all(lanes):
            raise InputError(
                f"stage {s}: a microbatch of {samples} samples cannot be split among "
                f"{len(lanes)} devices; take larger mini-batches or fewer microbatches"
            )
        found.append(lanes)
    return tuple(found)


def pieces(lengths: Sequence[int], receivers: int) -> list[list[tuple[int, int]]]:
    """Per sender and receiver, the range [start, stop) of the sender's samples that pass.

    ``lengths`` are the senders' numbers of samples. Remainders go to the receivers in
    turn, so that their shares differ by one sample at most.

    Examples
    --------
    >>> pieces([3, 3], 2)
    [[(0, 2), (2, 3)], [(0, 1), (1, 3)]]
    """
    table, turn = [], 0
    for length in lengths:
        each, more = divmod(length, receivers)
        sizes = [each + ((b - turn) % receivers < more) for b in range(receivers)]
        stops = list(accumulate(sizes))
        table.append([(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)])
        turn += more
    return table


def _dealt(senders: Sequence[Samples], receivers: int) -> tuple[Samples, ...]:
    cut = pieces([len(lane) for lane in senders], receivers)
    return tuple(
        tuple(
            row
            for lane, ranges in zip(senders, cut, strict=True)
            for row in lane[slice(*ranges[receiver])]
        )
        for receiver in range(receivers)
    )


class InvalidProgram(InvalidPlan):
    """A program that does not carry out its plan; the message names rank and instruction."""


@dataclass(frozen=True, slots=True)
class ProgramWork:
    """``iterations`` of a plan in sequence.

    In a periodic plan the gradients of ``families`` of stages are summed up like those of a stage's
    devices.
    """

    plan: PipelinePlan
    iterations: int = 1
    families: Families = ()

    @property
    def microbatches(self) -> int:
        """The number of microbatches in all iterations."""
        return self.iterations * self.plan.microbatches

    def iteration(self, microbatch: int | None) -> int:
        """The iteration of a microbatch."""
        assert microbatch is not None
        return microbatch // self.plan.microbatches

    @property
    def is_measured(self) -> bool:
        """Whether every update needs all gradients, as their norm does."""
        return any(len(one) == len(self.plan.stages) for one in self.families)

    def is_shared(self, s: int) -> bool:
        """Whether the update of a stage needs gradients of other ranks."""
        return self.plan.stages[s].reduces or any(s in one for one in self.families)

    def brings(self, s: int) -> Iterator[tuple[int, str]]:
        """Stages and devices whose gradients an update of stage ``s`` needs."""
        for other in {s}.union(*(one for one in self.families if s in one)):
            if self.is_shared(other):
                yield from ((other, name) for name in self.plan.stages[other].devices)
