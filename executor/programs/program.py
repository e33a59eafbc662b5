"""A program per rank: the instructions that carry out one training iteration of a plan.

A program prints and parses as text, a line per rank: ``0F0,0SEND_F0>1,0RECV_B0<1,0B0,0UPDATE``.
``>1`` is sent to rank 1, ``<1`` is received from it; ``1W0@sub`` runs in the rank's sub-stream.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from stagewright.formulations.plans.actions import VERSIONED, Action, ActionKind, W
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.shards import pairs
from stagewright.graphs.documents.errors import InputError

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
