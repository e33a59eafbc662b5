"""A training run with failures, event by event: the check of `formulations.parallelism.goodput`."""

import heapq
import math
from collections.abc import Sequence

import numpy as np

from stagewright.formulations.parallelism.goodput import Failures, RunSize


def simulated_goodput(
    failures: Failures,
    full: RunSize,
    smaller: Sequence[RunSize],
    every: Sequence[int],
    iterations: int,
    seed: int,
) -> float:
    """Useful over all seconds of one run of so many iterations, all of them saved at the end.

    ``smaller`` are the sizes with 1, 2, ... servers too few, ``every`` the iterations between
    checkpoints at each size, the full one first. Failures and repairs are drawn from exponential
    distributions. In a size that a returning server ends, the run saves its work and restarts.
    """
    run = _Run(failures, [full] * failures.spares + [full, *smaller], iterations, seed)
    counts = dict(zip([full, *smaller], every, strict=True))
    while run.saved < iterations:
        size = run.size()
        if size is None:
            run.clock = run.back[0]
        else:
            run.session(size, counts[size])
    return iterations * full.iteration_seconds / run.clock


class _Run:
    """The clock, the saved iterations, and when the servers that are away are back."""

    def __init__(
        self, failures: Failures, sizes: list[RunSize], iterations: int, seed: int
    ) -> None:
        self.failures, self.sizes, self.iterations = failures, sizes, iterations
        self.draw = np.random.default_rng(seed)
        self.clock, self.saved, self.started = 0.0, 0, False
        self.back: list[float] = []

    def size(self) -> RunSize | None:
        """The size with the servers that are there; None if the run waits."""
        while self.back and self.back[0] <= self.clock:
            heapq.heappop(self.back)
        return self.sizes[len(self.back)] if len(self.back) < len(self.sizes) else None

    def session(self, size: RunSize, count: int) -> None:
        """From a start to the next failure, to a larger size, or to the end."""
        failure = self.clock + self.draw.exponential(self.failures.mtbf_seconds / size.devices)
        begin = self.clock + (size.restart_seconds if self.started else 0.0)
        self.started = True
        change, cycle = self._change(size), count * size.iteration_seconds + size.stop_seconds
        left = self.iterations - self.saved
        stops = math.ceil(left / count) * size.stop_seconds
        end = begin + left * size.iteration_seconds + stops + size.write_seconds
        if end <= min(failure, change):
            self.clock, self.saved = end, self.iterations
            return
        saving = size.stop_seconds + size.write_seconds
        if begin < change and change + saving < failure:
            # In the stop of a checkpoint no work is done.
            cycles, rest = divmod(change - begin, cycle)
            self.saved += int(cycles) * count + min(count, int(rest / size.iteration_seconds))
            self.clock = change + saving
            return
        if change <= begin and change < failure:
            self.clock = change
            return
        complete = int(max(0.0, failure - begin - size.write_seconds) / cycle)
        self.clock, self.saved = failure, self.saved + complete * count
        if self.failures.repair_seconds:
            heapq.heappush(self.back, failure + self.draw.exponential(self.failures.repair_seconds))

    def _change(self, size: RunSize) -> float:
        """When a server is back with which the run is larger."""
        for returned, at in enumerate(sorted(self.back), 1):
            if self.sizes[len(self.back) - returned] != size:
                return at
        return math.inf
