"""A message with values that a computation needs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(slots=True)
class Arrival:
    """Values that a computation needs; ``peer`` is None if they come from this rank itself."""

    lane: int
    values: list[Tensor | None]
    peer: int | None = None
    works: tuple[dist.Work, ...] = ()
    posted_seconds: float = 0.0
    arrived: Callable[[], float] | None = None

    def wait(self) -> float:
        """Wait until it has arrived; its time, if a thread watches it, else now.

        Each receive is waited for once: with gloo, a second wait would be for another message.
        """
        if self.arrived is not None:
            return self.arrived()
        seconds = waited(self.works)
        self.works = ()
        return seconds


def waited(works: Sequence[dist.Work]) -> float:
    """Wait for all of ``works``; the time when they were done."""
    for work in works:
        work.wait()
    return time.perf_counter()
