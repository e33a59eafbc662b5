"""Simulated annealing on the rows of devices: a computation moves to another place of its row."""

import numpy as np
from numba import njit

from stagewright.graphs.documents.arrays import Ints
from stagewright.solvers.pipelines.compiled import inner
from stagewright.solvers.pipelines.row_kernels import RowTimes, keeps_limits, time_rows

REACH = 4.0  # mean distance of a move


@njit(cache=True, error_model="numpy")
def anneal_rows(
    times: RowTimes, rows: Ints, bounds: Ints, cost: float, heat: float, steps: int,
    random: np.random.Generator,
) -> float:  # fmt: skip
    """Change ``rows``, of this ``cost``, by random moves; the cost of the result.

    A move that costs x more is kept with probability exp(-x / ``heat``), and none is at the end:
    the best rows come back.
    """
    starts = np.zeros((times.seconds.size, times.microbatches))
    best, least, now = rows.copy(), cost, cost
    for _ in range(steps):
        d = int(random.integers(0, len(bounds) - 1))
        i = int(random.integers(bounds[d], bounds[d + 1]))
        away = 1 + int(random.exponential(REACH))
        j = i + away if random.random() < 0.5 else i - away
        j = min(max(bounds[d], j), bounds[d + 1] - 1)
        if rows[i] == rows[j]:
            continue
        _move(rows, i, j)
        if keeps_limits(times, rows, bounds[d], bounds[d + 1], d):
            found = time_rows(times, rows, bounds, starts)
            if found <= now or random.random() < np.exp((now - found) / heat):
                now = found
                if now < least:
                    least, best[:] = now, rows
                continue
        _move(rows, j, i)
    rows[:] = best
    return least


@inner
def _move(rows: Ints, i: int, j: int) -> None:
    """Move entry i to place j; those between shift by one."""
    code, step = rows[i], 1 if i < j else -1
    for k in range(i, j, step):
        rows[k] = rows[k + step]
    rows[j] = code
