"""Actions of a schedule, in the spelling of ``torch.distributed.pipelining``'s schedule files.

``2F0`` is stage 2, forward, microbatch 0; ``B`` a whole backward; ``2SEND_F0`` sends stage 2's
output of microbatch 0 to stage 3, ``3SEND_B0`` stage 3's input gradient back to stage 2;
``2REDUCE_GRAD`` is stage 2's all-reduce.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from stagewright.graphs.errors import InputError


class ActionKind(StrEnum):
    """What an action does; the values are torch's spelling."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SEND_F"
    SEND_BACKWARD = "SEND_B"
    REDUCE = "REDUCE_GRAD"


COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD)

# One spelling per action: no leading zeros, no digits of other scripts, no numbers without end.
_NUMBER = r"0|[1-9][0-9]{0,8}"
_PATTERN = re.compile(rf"({_NUMBER})(SEND_F|SEND_B|REDUCE_GRAD|F|B)({_NUMBER})?")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One action: stage, kind, and microbatch (None for an all-reduce only)."""

    stage: int
    kind: ActionKind
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if (self.microbatch is None) != (self.kind is ActionKind.REDUCE):
            raise InputError(f"{self}: a microbatch belongs to every action but an all-reduce")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


def parse_action(text: str) -> Action:
    """Read one action.

    Raises
    ------
    InputError
        If ``text`` is no action.

    Examples
    --------
    >>> str(parse_action("2SEND_F0"))
    '2SEND_F0'
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is no action; write for example 2F0, 1B3, 2SEND_F0")
    stage, kind, microbatch = match.groups()
    return Action(int(stage), ActionKind(kind), None if microbatch is None else int(microbatch))
