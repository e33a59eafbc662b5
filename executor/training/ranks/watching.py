"""What the main thread of a rank does, as another thread sees it: for the end of a hanging run."""

import sys
import sysconfig
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from stagewright.executor.capture.places import line_of_call
from stagewright.executor.programs.program import Instruction
from stagewright.executor.training.interpreter.recorder import carry_out
from stagewright.executor.training.ranks.endings import Member
from stagewright.formulations.plans.actions import OF_OPERATORS

# Whose code waits for other ranks, and does nothing else that may take long.
_WAITING = (str(Path(__file__).parents[1]), str(Path(dist.__file__).parent))
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))


@dataclass(slots=True)
class Watch:
    """What the main thread of a rank did when `look` was called last, and since when."""

    member: Member
    known: tuple[str, str] = ("", "")
    since: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Note what the main thread does now."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        found = self.member.place, _instruction(frame)
        if found != self.known:
            self.known, self.since = found, time.monotonic()

    def told(self) -> str:
        """In words, what it is in, for how long, and where in the user's code.

        Nothing of a rank that waits for another one.
        """
        self.look()
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None or frame.f_code.co_filename.startswith(_WAITING):
            return ""
        place, instruction = self.known
        line = line_of_call(_outside_libraries(frame))
        within = f"in {instruction} " if instruction else ""
        return f"{time.monotonic() - self.since:.0f} s {within}{place}{f', {line}' if line else ''}"


def _instruction(frame: FrameType | None) -> str:
    """The instruction of a row that is carried out; empty outside a row."""
    while frame is not None and frame.f_code is not carry_out.__code__:
        frame = frame.f_back
    one = None if frame is None else frame.f_locals.get("one")
    if not isinstance(one, Instruction):
        return ""
    action, number = one.action, one.action.microbatch
    if action.kind in OF_OPERATORS:
        return f"{action} (operator {action.stage})"
    return f"{action} (stage {action.stage}{'' if number is None else f', microbatch {number}'})"


def _outside_libraries(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame
