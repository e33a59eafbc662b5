"""Actions of a schedule, in the spelling of ``torch.distributed.pipelining``'s schedule files.

``2F0`` is stage 2, forward, microbatch 0; ``B`` a whole backward, which ``I`` (gradient of the
input) and ``W`` (of the weights) may replace; ``2SEND_F0`` sends stage 2's output of microbatch 0
to stage 3, ``3RECV_F0`` receives it there; ``3SEND_B0`` sends stage 3's input gradient back to
stage 2; ``2REDUCE_GRAD`` is stage 2's all-reduce. Not in torch's format are ``2UPDATE``, the
optimizer step, and the switches between versions of a stage's weights: ``2STASH0`` keeps version 0
when the next update makes another, ``2USE0`` makes the stage compute with it, ``2DROP0`` frees it.

Programs of placed operators have an operator's number in place of the stage, and that of its output
in place of the microbatch: ``12RUN``, ``12SEND_O0``, ``12RECV_O0``, ``12FREE0``.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Literal

from stagewright.graphs.documents.errors import InputError

Weights = Literal["flush", "stash", "stash+vertical-sync", "double-buffer"]
"""The rules by name, as the plan document has them; see `PipelinePlan`."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """The semantics of a weight update.

    Attributes
    ----------
    updates_every_round
        Whether weights change after every microbatch, or after every round of a round-robin stage;
        else once, at the end of the iteration. A version that a backward still needs is kept until
        it ends, next to the newest. The all-reduce and the update are parts of the backward.
    staleness
        By how many updates the weights of an iteration are older than the newest as it begins.
        That many versions are always held next to the newest.
    follows_first_stage
        Whether a microbatch uses on every stage the version that it used on the first.
    """

    name: Weights
    updates_every_round: bool = False
    staleness: int = 0
    follows_first_stage: bool = False

    @property
    def versions(self) -> int:
        """The number of versions of the weights that a stage always holds."""
        return 1 + self.staleness

    @property
    def may_overlap(self) -> bool:
        """Whether an iteration may begin before the previous iteration has ended."""
        return self.staleness > 0 or self.updates_every_round

    @property
    def keeps_versions(self) -> bool:
        """Whether a stage ever holds more than the newest version."""
        return self.may_overlap


FLUSH = WeightRule("flush")
STASH = WeightRule("stash", updates_every_round=True)
STASH_VERTICAL_SYNC = WeightRule(
    "stash+vertical-sync", updates_every_round=True, follows_first_stage=True
)
DOUBLE_BUFFER = WeightRule("double-buffer", staleness=1)

WEIGHT_RULES: dict[str, WeightRule] = {
    rule.name: rule for rule in (FLUSH, STASH, STASH_VERTICAL_SYNC, DOUBLE_BUFFER)
}


class ActionKind(StrEnum):
    """The kind of an action; the values are torch's spelling where torch has a spelling."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"
    REDUCE = "REDUCE_GRAD"
    UPDATE = "UPDATE"
    STASH = "STASH"
    USE = "USE"
    DROP = "DROP"
    RUN = "RUN"
    SEND_OUTPUT = "SEND_O"
    RECEIVE_OUTPUT = "RECV_O"
    FREE = "FREE"


# The field's short names, for modules of formulas.
F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD
REDUCE, UPDATE = ActionKind.REDUCE, ActionKind.UPDATE

COMPUTE = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT,
)
"""What keeps a device busy for a microbatch."""

ON_DEVICE = (*COMPUTE, ActionKind.UPDATE)
"""What keeps a device busy."""

BARE = (ActionKind.REDUCE, ActionKind.UPDATE, ActionKind.RUN)
"""Actions done once per iteration, not per microbatch."""

PLANNED = (*COMPUTE, ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD, REDUCE, UPDATE)
"""The kinds of action in a plan's schedule; the others occur only in programs."""

VERSIONED = (ActionKind.STASH, ActionKind.USE, ActionKind.DROP)
"""Actions with a version of the weights in place of a microbatch."""

OF_OPERATORS = (ActionKind.RUN, ActionKind.SEND_OUTPUT, ActionKind.RECEIVE_OUTPUT, ActionKind.FREE)
"""Actions of programs of placed operators."""

# One spelling per action: no leading zeros, ASCII digits only, numbers of bounded length.
_NUMBER = r"0|[1-9][0-9]{0,8}"
_KINDS = "|".join(sorted(ActionKind, key=len, reverse=True))
_PATTERN = re.compile(rf"({_NUMBER})({_KINDS})({_NUMBER})?")


@dataclass(frozen=True, slots=True, order=True)
class Operation:
    """An action without microbatch: the entry that a pattern repeats for every microbatch."""

    stage: int
    kind: ActionKind

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}"

    def of(self, microbatch: int) -> "Action":
        """The operation on one microbatch; an all-reduce or update has none."""
        return Action(self.stage, self.kind, None if self.kind in BARE else microbatch)


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One action: stage, kind, and microbatch.

    ``microbatch`` is None for an all-reduce and an update, and the version of the weights for
    ``STASH``, ``USE`` and ``DROP``. Of placed operators ``stage`` is the operator's number, and
    ``microbatch`` that of an output.
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if (self.microbatch is None) != (self.kind in BARE):
            raise InputError(
                f"{self}: a microbatch or version belongs to every action but an all-reduce and "
                "an update"
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


def along_way(action: Action, *, backward_first: bool = False) -> tuple[int, int]:
    """Sort key of zero-length actions at one instant: the order in which a microbatch meets them.

    Forward by stage, then backward; weight gradients come last, since only the optimizer step
    waits for them. If the backward comes first, the forwards of the next iteration follow the step.
    """
    kind = action.kind
    if kind in (ActionKind.FORWARD, ActionKind.SEND_FORWARD):
        return 4 if backward_first else 0, action.stage
    late = (ActionKind.WEIGHT_GRADIENT, ActionKind.UPDATE)
    return 2 + late.index(kind) if kind in late else 1, -action.stage


@lru_cache(maxsize=2**16)  # the devices of a stage repeat the texts, and every view reads them
def parse_action(text: str) -> Action:
    """Read one action.

    Raises InputError if ``text`` is not an action.

    Examples
    --------
    >>> str(parse_action("2SEND_F0"))
    '2SEND_F0'
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not an action; write for example 2F0, 1B3, 2SEND_F0")
    stage, kind, microbatch = match.groups()
    return Action(int(stage), ActionKind(kind), None if microbatch is None else int(microbatch))


def parse_operation(text: str) -> Operation:
    """Read one operation.

    Raises InputError if ``text`` is not an operation.

    Examples
    --------
    >>> str(parse_operation("2SEND_F"))
    '2SEND_F'
    """
    match = _PATTERN.fullmatch(text)
    if match is None or match[3] is not None:
        raise InputError(f"{text!r} is not an operation; write for example 2F, 1B, 2SEND_F")
    return Operation(int(match[1]), ActionKind(match[2]))
