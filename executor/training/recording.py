"""The actions of a rank with their times, on its own clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

import torch.distributed as dist

from stagewright.executor.programs.trace import RankAction

MEETINGS = 15  # barriers of all ranks before a run that is traced


@dataclass(slots=True)
class Recording:
    """The actions of this rank from ``step`` until no mini-batch was in flight.

    Times are on its own clock; ``met_seconds`` are its readings after barriers of all ranks.
    """

    step: int
    met_seconds: list[float]
    losses: list[float] = field(default_factory=list)
    records: list[RankAction] = field(default_factory=list)
    iterations: int | None = None

    @property
    def loss(self) -> float | None:
        """The mean loss, on ranks of the last stage."""
        return fmean(self.losses) if self.losses else None

    def begin(self, first: "Recording") -> float:
        """The common start on this rank's clock; ``first`` is the first rank's recording."""
        pairs = zip(self.met_seconds, first.met_seconds, strict=True)
        return first.met_seconds[-1] + median(own - its for own, its in pairs)


def meet(group: dist.ProcessGroup | None) -> None:
    """Wait for all ranks."""
    if group is not None:
        dist.barrier(group)


def records_since(start: float, records: Sequence[RankAction]) -> list[RankAction]:
    """The records with times that count from ``start``."""
    return [
        replace(
            one,
            start_seconds=max(0.0, one.start_seconds - start),
            finish_seconds=max(0.0, one.finish_seconds - start),
        )
        for one in records
    ]
