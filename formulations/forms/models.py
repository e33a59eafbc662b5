"""The canonical shapes in which a problem is handed to a backend.

``Intervals`` become a mixed-integer program by Manne's disjunctive model: one binary per pair that
may come in either order. It is the second opinion on small cases.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Bools, Floats, Ints

if TYPE_CHECKING:
    from scipy import sparse


ABSENT = -1  # in place of the start time of an interval


@dataclass(frozen=True, slots=True, eq=False)
class LinearProgram:
    """min cost @ x  s.t.  row_lower <= matrix @ x <= row_upper, lower <= x <= upper.

    ``matrix`` has shape (rows, n); ``integral`` marks the columns that must be integers.
    """

    cost: Floats
    matrix: "sparse.csr_array"
    row_lower: Floats
    row_upper: Floats
    lower: Floats
    upper: Floats
    integral: Bools
    hint: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HeldAmounts:
    """``amounts[k]`` is held from the start of interval ``first[k]`` to the end of ``last[k]``.

    Never more than ``capacity`` is held at a time.
    """

    first: Ints
    last: Ints
    amounts: Ints
    capacity: int


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Non-preemptive intervals of fixed integer duration; minimise the largest end plus tail.

    ``machines[k]`` are intervals that must not overlap. Each row (i, j) of ``before`` asks that j
    starts no earlier than i ends. ``tails[i]`` follows the end of interval i. ``lower_bound`` is a
    proved bound on the objective; ``horizon`` an upper bound on it and on all ends; ``hint`` start
    times of a feasible answer. With ``spans``, the objective is the longest time, over its rows
    (i, j), from the start of i to the end of j with its tail.

    Each of ``choices`` are intervals of which one is present, and the others are ``ABSENT`` in
    place of a start time; what is asked of an absent interval is not asked.
    """

    durations: Ints
    machines: tuple[Ints, ...]
    before: Ints
    tails: Ints
    horizon: int
    lower_bound: int = 0
    hint: Ints | None = None
    stores: tuple[HeldAmounts, ...] = ()
    spans: Ints | None = None
    choices: tuple[Ints, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Convex:
    """A ``cvxpy.Problem`` and the ``cvxpy.Variable`` whose value is asked for.

    Solver libraries are imported in ``solvers`` only, so that their types are not named here.
    """

    problem: Any
    variable: Any


def weak_duality_bound(form: LinearProgram, duals: Floats) -> float:
    """A lower bound on the minimum of ``form`` from one number per row, whatever they are.

    For every y, c x = y A x + (c - y A) x, and both parts are least at a bound of the rows and of
    the columns. Numbers of a sign that would need an absent bound are taken for 0, so that
    rounding in a solver can weaken the bound but never make it wrong.
    """
    free_below = (duals > 0) & ~np.isfinite(form.row_lower)
    free_above = (duals < 0) & ~np.isfinite(form.row_upper)
    y = np.where(free_below | free_above, 0.0, duals)
    rows = np.where(y > 0, form.row_lower, form.row_upper)
    reduced = form.cost - form.matrix.T @ y
    columns = np.where(reduced > 0, form.lower, form.upper)
    return float(y[y != 0] @ rows[y != 0] + reduced[reduced != 0] @ columns[reduced != 0])


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
        matrix=sparse_rows(rows, n + 1 + binaries),
        row_lower=np.array(least),
        row_upper=np.full(len(rows), np.inf),
        lower=np.r_[np.zeros(n), float(form.lower_bound), np.zeros(binaries)],
        upper=np.r_[np.full(n + 1, horizon), np.ones(binaries)],
        integral=integral,
    )


def starts_of(values: Floats, intervals: int) -> Ints:
    """The start times in an answer to :func:`by_disjunctions`."""
    return np.round(values[:intervals]).astype(np.int64)


def sparse_rows(rows: list[dict[int, float]], columns: int) -> "sparse.csr_array":
    """The matrix of rows that are given as values by column."""
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
