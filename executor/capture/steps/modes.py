"""Modes under which a step is traced: lines of the user's code, and recurrent layers one by one.

AOTAutograd traces a recurrent module as the operators of every time step, by a decomposition that
leaves out the dropout between layers (torch 2.13: ``_rnn_helper`` compares ``num_layers < i - 1``).
One call per layer, with the dropout between them, draws and computes what the whole call does.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
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


KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class LayerByLayer(TorchFunctionMode):
    """Replaces a call of several recurrent layers with dropout by calls of one layer each.

    Packed sequences do not get here: their shapes depend on values.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in KINDS and _drops(*args[4:7]):
            return _by_layer(func, name == "lstm", *args)
        return func(*args, **(kwargs or {}))


def _drops(layers: int, dropout: float, train: bool) -> bool:
    return layers > 1 and dropout > 0 and train


def _by_layer(
    func: Any,
    with_cells: bool,
    x: Tensor,
    hidden: Any,
    parameters: list[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """The results of a module's call; the arguments are those of ``torch._VF.lstm``."""
    states = list(hidden) if with_cells else [hidden]
    width, directions = len(parameters) // layers, 1 + bidirectional
    ends: list[list[Tensor]] = [[] for _ in states]
    for layer in range(layers):
        if layer:
            x = torch.dropout(x, dropout, True)
        rows = slice(layer * directions, (layer + 1) * directions)
        own = parameters[layer * width : (layer + 1) * width]
        first = [state[rows] for state in states]
        given = first if with_cells else first[0]
        x, *last = func(x, given, own, biases, 1, 0.0, train, bidirectional, batch_first)
        for end, one in zip(ends, last, strict=True):
            end.append(one)
    return (x, *(torch.cat(end) for end in ends))
