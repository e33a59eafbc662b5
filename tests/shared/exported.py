"""Models that are exported with an example: how tests capture and run them."""

from typing import Any

import torch
from torch import Tensor, nn

from stagewright.executor.capture.exported.exporting import Example
from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.capture.signature import signed
from stagewright.executor.capture.tracing import capture

WIDTH, WORDS, SAMPLES, LENGTH = 6, 11, 4, 5
CPU = torch.device("cpu")

Batch = dict[str, Any]


def captured(
    model: nn.Module, batch: Any, *, takes_loss: bool = True, autocast: torch.dtype | None = None
) -> LayeredModel:
    tensors, signature = signed(batch)
    example = Example(tensors, signature, takes_loss, CPU, torch.float64, autocast)
    return capture(model, example)


def run(layered: LayeredModel, batch: Any) -> Any:
    values, signature = signed(batch)
    layered.require_called(signature)
    layered.require_sizes([tuple(one.shape) for one in values])
    for layer in layered.layers:
        values = layer.module(*values)
    return layered.result(values)


def words(seed: int, samples: int = SAMPLES, length: int = LENGTH) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (samples, length), generator=generator)
    return {"ids": ids, "labels": ids.roll(1, 1)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, scale: float = 1.0) -> Any:
        mixed = torch.tanh(self.inner(x)) * scale
        if mask is not None:
            mixed = mask.to(x.dtype) @ mixed
        return x + mixed
