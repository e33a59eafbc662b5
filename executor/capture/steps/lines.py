"""The line of the user's code, and the module, that an operator comes from."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx import traceback as fx_traceback
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from stagewright.executor.capture.places import line_of_call


class _Marking(TorchFunctionMode):
    """Gives every call of torch the line that it is made on; autograd's nodes keep it."""

    def __init__(self, modules: list[str]) -> None:
        super().__init__()
        self.modules = modules

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        line = line_of_call(sys._getframe(1))
        module = f" ({self.modules[-1]})" if self.modules and self.modules[-1] else ""
        fx_traceback.set_stack_trace([line + module] if line else [])
        return func(*args, **(kwargs or {}))


@contextmanager
def lines_marked(model: nn.Module) -> Iterator[None]:
    """Mark traced calls with FILE:LINE of the user's code and the path of the module."""
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
