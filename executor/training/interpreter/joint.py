"""Sums over ranks that an update needs."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch.distributed as dist

from stagewright.executor.training.stages.weights import TiedSums


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """Sums over ranks that an update needs.

    ``group`` are the processes that sum up the counts of losses, None for one alone: all of them,
    or those of a split last stage where every microbatch has its own update. ``stages`` are updated
    together, at the end of an iteration. ``sum_tied`` sums up the gradients of parameters that
    stages share; ``tied`` does so while the next gradients are computed.
    ``squares`` is this rank's part of the squared norm of all gradients.
    """

    group: dist.ProcessGroup | None
    stages: frozenset[int]
    sum_tied: Callable[[], None]
    squares: Callable[[], float]
    clip_norm: float = inf
    tied: TiedSums | None = None
