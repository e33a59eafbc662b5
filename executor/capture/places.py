"""Where in a user's code an operator is called, an error was raised, or a value decides."""

import dis
import linecache
import os
from collections.abc import Sequence
from types import FrameType, TracebackType

import torch

_CAPTURE = os.path.dirname(__file__)
FOREIGN = (os.path.dirname(torch.__file__), _CAPTURE, "<")
# Of torch's own code, what decides by values as a user's does.
_DECIDES = tuple(os.path.join(FOREIGN[0], name) for name in ("distributions", "nn"))
_OURS = os.path.dirname(_CAPTURE)  # whose losses are nodes of a graph like a user's, but no errors
# Calls the user's model and loss. What runs within their calls is in another file, modes.py:
# a frame of this file is where a user's frames end.
_CALLER = os.path.join(_CAPTURE, "steps", "joint.py")


def place_of(error: BaseException) -> str:
    """File, line and source of the innermost frame of the user's code, after " at "."""
    frame, line = None, 0
    trace = error.__traceback__
    while trace is not None:
        if _is_users(trace.tb_frame, _OURS):
            frame, line = trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    if frame is None:
        return ""
    path = frame.f_code.co_filename
    return f" at {path}:{line} ({linecache.getline(path, line).strip()})"


def line_of(trace: TracebackType | None) -> str | None:
    """The innermost line of the user's code in a traceback."""
    found = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _CALLER:
            found = None
        if _is_users(trace.tb_frame):
            found = _spelled(trace.tb_frame, trace.tb_lineno)
        trace = trace.tb_next
    return found


def line_of_call(frame: FrameType | None) -> str | None:
    """The innermost line of the user's code that a call is made from."""
    while frame is not None and frame.f_code.co_filename != _CALLER:
        if _is_users(frame):
            return _spelled(frame, frame.f_lineno)
        frame = frame.f_back
    return None


def deciding(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that asks for a truth value, outside the code that computes it."""
    while frame is not None and not _is_users(frame):
        if frame.f_code.co_filename.startswith(_DECIDES):
            break
        frame = frame.f_back
    return frame


def shown(frame: FrameType) -> str:
    """The line of a frame, with its source."""
    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{_spelled(frame, frame.f_lineno)} ({source})"


def unchecked(line: str) -> str:
    """What is said of a check that counts as passed."""
    return f"not checked: {line}"


def passing(frame: FrameType) -> bool | None:
    """The truth value with which a check at ``frame`` passes.

    A check is an assertion, or a condition of which one branch only raises an error; None if the
    frame is at something else.
    """
    every = list(dis.get_instructions(frame.f_code))
    rest = [one for one in every if one.offset >= frame.f_lasti and one.opname != "CACHE"]
    if rest[0].opname in ("TO_BOOL", "COMPARE_OP"):  # which come before the jump since 3.13
        rest = rest[1:]
    jump = rest[0]
    if "JUMP" not in jump.opname or "_IF_" not in jump.opname:
        return None
    stays = _raises(rest[1:])
    if stays == _raises([one for one in every if one.offset >= jump.argval]):
        return None
    return ("IF_TRUE" in jump.opname) == stays


def _raises(instructions: Sequence[dis.Instruction]) -> bool:
    """Whether the instructions lead to an error without a further decision."""
    for one in instructions:
        if one.opname.startswith(("JUMP", "POP_JUMP", "RETURN", "FOR_ITER", "YIELD", "RERAISE")):
            return False
        if one.opname == "RAISE_VARARGS":
            return True
    return False


def _is_users(frame: FrameType, *foreign: str) -> bool:
    return not frame.f_code.co_filename.startswith((*FOREIGN, *foreign))


def _spelled(frame: FrameType, line: int) -> str:
    """The path relative to the current folder where it is below it."""
    path = frame.f_code.co_filename
    relative = os.path.relpath(path)
    return f"{path if relative.startswith('..') else relative}:{line}"
