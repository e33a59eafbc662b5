"""The bound that duals prove, recomputed in floats from the form alone."""

import numpy as np

from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.arrays import Floats


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
