"""Where in a user's code an operator is called, or an error was raised."""

import linecache
import os
from types import FrameType, TracebackType

import torch

_CAPTURE = os.path.dirname(__file__)
FOREIGN = (os.path.dirname(torch.__file__), _CAPTURE, "<")
_OURS = os.path.dirname(_CAPTURE)  # whose losses are nodes of a graph like a user's, but no errors
# Calls the user's model and loss. What runs within their calls is in other files, lines.py and
# recurrent.py: a frame of this file is where a user's frames end.
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


def _is_users(frame: FrameType, *foreign: str) -> bool:
    return not frame.f_code.co_filename.startswith((*FOREIGN, *foreign))


def _spelled(frame: FrameType, line: int) -> str:
    """The path relative to the current folder where it is below it."""
    path = frame.f_code.co_filename
    relative = os.path.relpath(path)
    return f"{path if relative.startswith('..') else relative}:{line}"
