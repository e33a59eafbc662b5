"""Sums over ranks that an update needs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import torch.distributed as dist
from torch import Tensor

from stagewright.executor.training.stages.weights import TiedSums


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """Sums over ranks that an update needs.

    ``group`` are the processes that sum up the counts of losses, None for one alone: all of them,
    or those of a split last stage where every microbatch has its own update. ``stages`` are updated
    together, at the end of an iteration. ``sum_tied`` sums up the gradients of parameters that
    stages share; ``tied`` does so while the next gradients are computed.
    ``squares`` is this rank's part of the squared norm of all gradients. An update is by the
    gradients of ``accumulate`` mini-batches; ``counted`` are the counts of those so far.
    """

    group: dist.ProcessGroup | None
    stages: frozenset[int]
    sum_tied: Callable[[], None]
    squares: Callable[[], float]
    clip_norm: float = inf
    tied: TiedSums | None = None
    accumulate: int = 1
    counted: list[Tensor | None] = field(default_factory=list)
