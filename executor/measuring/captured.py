"""A model captured for the sizes of microbatches that are measured."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from stagewright.executor.capture.exported.exporting import Example
from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.capture.tracing import capture
from stagewright.executor.training.data.batches import (
    require_as_many,
    require_samples,
    typed_inputs,
)
from stagewright.executor.training.stages.initialise import Model

SEED = 0


def captured_by_size(
    make: Callable[[], Model],
    inputs: Any,
    sizes: Sequence[int],
    takes_loss: bool,
    *,
    device: torch.device,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
) -> dict[int, LayeredModel]:
    """The layers of a new model on ``device`` for microbatches of ``sizes`` of ``inputs``.

    They share their parameters, of type ``dtype``. ``takes_loss`` as in `Example`.

    Raises
    ------
    InputError
        If the model cannot be captured, or ``inputs`` have fewer samples.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        made = make()
    for module in [made] if isinstance(made, nn.Module) else made:
        module.to(device=device, dtype=dtype)
    given, signature = typed_inputs(inputs, dtype)
    require_as_many(given, ())
    require_samples(given, sizes)
    example = Example(given, signature, takes_loss, device, dtype, autocast)
    found: dict[int, LayeredModel] = {}
    for size in sorted(set(sizes), reverse=True):
        same = next(iter(found.values()), None)
        if same is not None and not same.guards:  # traced, for all sizes
            found[size] = same
            continue
        found[size] = capture(made, example.first(size))
    return found
