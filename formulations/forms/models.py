"""The canonical shapes in which a problem is handed to a backend."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

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
