"""CVXPY answers ``Convex``: linear programs with HiGHS, others with Clarabel."""

import math
from time import perf_counter
from typing import Any

import cvxpy as cp
import numpy as np

from stagewright.formulations.forms.answers import Answer, Limits, OnProgress, Status
from stagewright.formulations.forms.models import Convex
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.backends.cvxpy_linear import highs_options, solved

GAP = 1e-10  # of Clarabel's primal and dual, absolute and relative


def run(form: Convex, limits: Limits, on_progress: OnProgress) -> Answer[Floats]:
    """The optimum; without one there are no values. The constraints keep their duals.

    Only HiGHS uses the threads and the seed: there is no chance in Clarabel.
    """
    began = perf_counter()
    problem: cp.Problem = form.problem
    solver, options = _solver(problem, limits)
    with np.errstate(divide="ignore"):  # of inv_pos at CVXPY's first point
        status = solved(problem, solver, options)
    seconds = perf_counter() - began
    name = f"cvxpy-{solver.lower()}"
    if status is Status.NO_ANSWER:
        unproved = -math.inf if isinstance(problem.objective, cp.Minimize) else math.inf
        return Answer(status, None, None, unproved, seconds, name)
    value = float(problem.value)  # infinite without an optimum
    if status is not Status.OPTIMAL:
        return Answer(status, None, None, value, seconds, name)
    return Answer(status, np.asarray(form.variable.value), value, value, seconds, name)


def _solver(problem: cp.Problem, limits: Limits) -> tuple[str, dict[str, Any]]:
    if problem.is_lp():
        return cp.HIGHS, highs_options(limits)
    options = {"time_limit": float(limits.seconds), "tol_gap_rel": GAP, "tol_gap_abs": GAP}
    return cp.CLARABEL, options
