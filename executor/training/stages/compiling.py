"""Layers that torch compiles."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def compiled_layer(module: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    """A layer compiled by torch, which draws what the layer itself would draw."""
    from torch._inductor import config

    config.fallback_random = True
    compiled: Callable[..., tuple[Tensor, ...]] = torch.compile(module)
    return compiled
