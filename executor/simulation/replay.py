"""The order of a plan with other durations, such as measured ones: a longest path."""

import numpy as np

from stagewright.executor.simulation.run import Run
from stagewright.executor.simulation.waiting import edges
from stagewright.graphs.documents.arrays import Floats, Ints


class Replay:
    """Every entry of a run starts as soon as its dependencies and predecessors have ended.

    Arrays of seconds have a row per entry of the run and a column per case. What runs beside
    another kernel in a sub-stream lasts as long as it is said to. ``pairs`` are the entries
    (before, after).
    """

    def __init__(self, run: Run) -> None:
        self.pairs: Ints = np.array([*edges(run)], dtype=int).reshape(-1, 2)
        self._followers: list[list[int]] = [[] for _ in run.actions]
        for before, after in self.pairs.tolist():
            self._followers[before].append(after)
        awaited = np.bincount(self.pairs[:, 1], minlength=len(run.actions)).tolist()
        self._order = [i for i, count in enumerate(awaited) if count == 0]
        for i in self._order:  # grows during the loop
            for j in self._followers[i]:
                awaited[j] -= 1
                if awaited[j] == 0:
                    self._order.append(j)

    def ends(self, seconds: Floats) -> Floats:
        """When every entry ends."""
        starts, ends = np.zeros_like(seconds), np.zeros_like(seconds)
        for i in self._order:
            np.add(starts[i], seconds[i], out=ends[i])
            for j in self._followers[i]:
                np.maximum(starts[j], ends[i], out=starts[j])
        return ends

    def ready(self, ends: Floats) -> Floats:
        """The time at which all entries that an entry waits for have ended."""
        found = np.zeros_like(ends)
        np.maximum.at(found, self.pairs[:, 1], ends[self.pairs[:, 0]])
        return found
