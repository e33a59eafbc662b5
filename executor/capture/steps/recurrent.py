"""Recurrent modules of several layers, one call per layer.

AOTAutograd traces a recurrent module as the operators of every time step, by a decomposition that
leaves out the dropout between layers (torch 2.13: ``_rnn_helper`` compares ``num_layers < i - 1``).
One call per layer, with the dropout between them, draws and computes what the whole call does.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
