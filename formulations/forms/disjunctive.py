"""``Intervals`` as a mixed-integer program: one binary per pair that may come in either order.

Manne's disjunctive model. It is the second opinion on small cases; CP-SAT is the way to large ones.
"""

import math
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from stagewright.formulations.forms.models import Intervals, LinearProgram
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats, Ints

if TYPE_CHECKING:
    from scipy import sparse


TICKS = 24  # log2 of the horizon for times without a common unit; finer ticks slow the proofs
_MAX_TICKS = 2**40  # times with a common unit are taken exactly up to this horizon
_MAX_DENOMINATOR = 10_000  # of a time as a fraction of the least time
SHARES = 2.0**40  # integers in a memory
EXACT = 1e-12  # relative error of a time that still counts as a multiple of the unit


def exact_unit(values: Floats, most: float) -> float | None:
    """1 for integers, else the common unit of ``values``; None without one that is large enough."""
    positive = values[values > 0]
    if len(positive) == 0:
        return 1.0
    for unit in (1.0, _common_unit(positive)):
        if most <= _MAX_TICKS * unit and are_multiples(positive, unit):
            return unit
    return None


def tick(times: Floats, horizon: float) -> float:
    """Time per tick: the exact unit, else a power of two that gives ``TICKS`` bits."""
    unit = exact_unit(times, horizon)
    return math.ldexp(1.0, math.frexp(horizon)[1] - TICKS) if unit is None else unit


def in_ticks(times: Floats, unit: float) -> Floats:
    """``times`` in ticks, rounded down unless they are multiples of ``unit``."""
    ticks = times / unit
    nearest = np.round(ticks)
    multiple = np.abs(ticks - nearest) <= EXACT * nearest
    return np.where(multiple, nearest, np.floor(ticks))


def lost_seconds(times: Floats, unit: float) -> Floats:
    """Seconds that each of ``times`` loses by rounding to ticks; 0 for multiples of ``unit``."""
    return np.maximum(times - in_ticks(times, unit) * unit, 0.0)


def memory_shares(held: Floats, memory: float) -> tuple[list[int], int]:
    """Bytes as integers (shares of memory), and the memory as such an integer.

    They are rounded down, and the tolerance of memory is added: what fits is not lost. What is too
    large stays so.
    """
    shares = np.minimum(held / memory, 2.0) if memory else np.where(held > 0, 2.0, 0.0)
    room = SHARES * (1 + RELATIVE_TOLERANCE) if memory else 0.0
    return np.floor(shares * SHARES).astype(np.int64).tolist(), int(room)


def _common_unit(times: Floats) -> float:
    """The largest unit of which all ``times`` are multiples, estimated from their ratios.

    If that unit would be too small to be used, any other unit that is too small.
    """
    least = float(times.min())
    ratios = [Fraction(time / least).limit_denominator(_MAX_DENOMINATOR) for time in times.tolist()]
    return least / min(math.lcm(*(ratio.denominator for ratio in ratios)), 2 * _MAX_TICKS)


def are_multiples(times: Floats, unit: float) -> bool:
    """Whether all ``times`` are multiples of ``unit``."""
    ticks = times / unit
    return bool((np.abs(ticks - np.round(ticks)) <= EXACT * ticks).all())


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
