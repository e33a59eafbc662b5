"""What the ranks do together for an update."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch.distributed as dist

from stagewright.executor.training.stages.weights import TiedSums


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """What the ranks do together for an update.

    ``group`` are the processes that sum up what the losses count, None for one alone: all of them,
    or those of a split last stage where every microbatch is an update of its own. ``stages`` are
    updated together, at the end of an iteration. ``sum_tied`` sums up the gradients of parameters
    that several stages have; ``tied`` does so where the next gradients are made meanwhile.
    ``squares`` is this rank's part of the squared norm of all gradients.
    """

    group: dist.ProcessGroup | None
    stages: frozenset[int]
    sum_tied: Callable[[], None]
    squares: Callable[[], float]
    clip_norm: float = inf
    tied: TiedSums | None = None
