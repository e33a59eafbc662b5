"""``Intervals`` as a mixed-integer program: one binary per pair that may come in either order.

Manne's disjunctive model. It is the second opinion on small cases; CP-SAT is the way to large ones.
"""

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from stagewright.formulations.forms.models import Intervals, LinearProgram
from stagewright.graphs.documents.arrays import Floats, Ints

if TYPE_CHECKING:
    from scipy import sparse


def by_disjunctions(form: Intervals) -> LinearProgram:
    """The big-M model of ``form``; columns are the n starts, the makespan, and the binaries.

    M is the horizon. Pairs whose order follows from ``before`` need no binary.
    """
    n, horizon = len(form.durations), float(form.horizon)
    durations, tails = form.durations.astype(float), form.tails.astype(float)
    after = _reachable(form)
    pairs = [
        (int(a), int(b))
        for machine in form.machines
        for a, b in combinations(machine, 2)
        if not (after[a, b] or after[b, a])
    ]
    rows: list[dict[int, float]] = [{j: 1, i: -1} for i, j in form.before.tolist()]
    least = [durations[i] for i, _ in form.before.tolist()]
    for i in range(n):
        rows.append({n: 1, i: -1})
        least.append(durations[i] + tails[i])
    for y, (a, b) in enumerate(pairs, start=n + 1):
        # y = 1: b starts after a ends; y = 0: a starts after b ends.
        rows += [{b: 1, a: -1, y: -horizon}, {a: 1, b: -1, y: horizon}]
        least += [durations[a] - horizon, durations[b]]
    binaries = len(pairs)
    integral = np.r_[np.zeros(n + 1, dtype=bool), np.ones(binaries, dtype=bool)]
    return LinearProgram(
        cost=np.r_[np.zeros(n), 1.0, np.zeros(binaries)],
        matrix=_sparse(rows, n + 1 + binaries),
        row_lower=np.array(least),
        row_upper=np.full(len(rows), np.inf),
        lower=np.r_[np.zeros(n), float(form.lower_bound), np.zeros(binaries)],
        upper=np.r_[np.full(n + 1, horizon), np.ones(binaries)],
        integral=integral,
    )


def starts_of(values: Floats, intervals: int) -> Ints:
    """The start times in an answer to :func:`by_disjunctions`."""
    return np.round(values[:intervals]).astype(np.int64)


def _sparse(rows: list[dict[int, float]], columns: int) -> "sparse.csr_array":
    from scipy import sparse  # slow to import

    lengths = [len(row) for row in rows]
    return sparse.csr_array(
        (
            np.array([value for row in rows for value in row.values()], dtype=float),
            np.array([column for row in rows for column in row], dtype=np.int32),
            np.cumsum([0, *lengths], dtype=np.int32),
        ),
        shape=(len(rows), columns),
    )


def _reachable(form: Intervals) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Shape (n, n): whether ``before`` puts interval j after interval i, by squaring."""
    n = len(form.durations)
    reach = np.zeros((n, n), dtype=bool)
    reach[form.before[:, 0], form.before[:, 1]] = True
    for _ in range(max(1, n.bit_length())):
        reach |= reach @ reach
    return reach
