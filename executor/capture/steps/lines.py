"""The line of the user's code, and the module, that an operator comes from."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.fx import traceback as fx_traceback
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

FOREIGN = (os.path.dirname(torch.__file__), os.path.dirname(__file__), "<")
CALLER = os.path.join(os.path.dirname(__file__), "joint.py")  # of the user's model and loss


class _Marking(TorchFunctionMode):
    """Gives every call of torch the line that it is made on; autograd's nodes keep it."""

    def __init__(self, modules: list[str]) -> None:
        super().__init__()
        self.modules = modules

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        line = _line(sys._getframe(1))
        module = f" ({self.modules[-1]})" if self.modules and self.modules[-1] else ""
        fx_traceback.set_stack_trace([line + module] if line else [])
        return func(*args, **(kwargs or {}))


@contextmanager
def lines_marked(model: nn.Module) -> Iterator[None]:
    """Mark what is traced within: FILE:LINE of the user's code, and the path of its module."""
    paths = {id(module): path for path, module in model.named_modules()}
    modules: list[str] = []

    def enter(module: nn.Module, _: Any) -> None:
        modules.append(paths.get(id(module), ""))

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        modules.pop()

    handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
    try:
        with _Marking(modules):
            yield
    finally:
        for handle in handles:
            handle.remove()


def line_of(trace: TracebackType | None) -> str | None:
    """The innermost line of the user's code in a traceback."""
    found = None
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name == CALLER:
            found = None
        if not name.startswith(FOREIGN):
            found = _spelled(name, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _line(frame: FrameType | None) -> str | None:
    """The innermost line of the user's code that a call is made from."""
    while frame is not None and frame.f_code.co_filename != CALLER:
        if not frame.f_code.co_filename.startswith(FOREIGN):
            return _spelled(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def _spelled(path: str, line: int) -> str:
    """The path relative to the current folder where it is below it."""
    relative = os.path.relpath(path)
    return f"{path if relative.startswith('..') else relative}:{line}"
