"""CVXPY answers ``LinearProgram``, written out as its algebra, and ``Convex``.

Linear programs are solved with HiGHS, others with Clarabel.
"""

import math
import warnings
from time import perf_counter
from typing import Any

import cvxpy as cp
import numpy as np

from stagewright.formulations.forms.answers import Answer, Limits, OnProgress, Status
from stagewright.formulations.forms.models import Convex, LinearProgram
from stagewright.graphs.documents.arrays import Bools, Floats
from stagewright.solvers.backends.backend import UnknownStatusError

STATUS = {
    cp.OPTIMAL: Status.OPTIMAL,
    cp.INFEASIBLE: Status.INFEASIBLE,
    cp.UNBOUNDED: Status.UNBOUNDED,
    cp.USER_LIMIT: Status.NO_ANSWER,
}


def highs_options(limits: Limits) -> dict[str, Any]:
    """Options for HiGHS."""
    return {
        "time_limit": float(limits.seconds),
        "random_seed": limits.seed,
        "parallel": "on" if limits.threads > 1 else "off",
        "mip_rel_gap": 0.0,
    }


def solved(problem: cp.Problem, solver: str, options: dict[str, Any]) -> Status:
    """Solve ``problem`` and return the status.

    If presolve could not tell infeasible from unbounded, the problem is solved without its
    objective.

    Raises UnknownStatusError if CVXPY reports a status that the table does not list.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what the status says as well
        # There are no parameters, so CVXPY need not check the rules for them.
        problem.solve(solver=solver, ignore_dpp=True, **options)
    if problem.status == cp.settings.INFEASIBLE_OR_UNBOUNDED:
        feasible = solved(cp.Problem(cp.Minimize(0), problem.constraints), solver, options)
        return Status.UNBOUNDED if feasible is Status.OPTIMAL else feasible
    if problem.status not in STATUS:
        raise UnknownStatusError(f"{solver} through CVXPY ended with {problem.status}")
    return STATUS[problem.status]


NAME = "cvxpy"
FEASIBLE = 2  # HiGHS's kSolutionStatusFeasible


def run(form: LinearProgram, limits: Limits, on_progress: OnProgress) -> Answer[Floats]:
    """Minimise ``form``; the hint is not used, and no progress is reported."""
    began = perf_counter()
    program = _Program(form)
    status = solved(program.problem, cp.HIGHS, highs_options(limits))
    if status is Status.NO_ANSWER and program.has_point():
        status = Status.FEASIBLE
    bound = program.bound(status)
    seconds = perf_counter() - began
    if status not in (Status.OPTIMAL, Status.FEASIBLE):
        return Answer(status, None, None, bound, seconds, NAME)
    values = np.asarray(program.x.value, dtype=float)
    duals = None if form.integral.any() else program.duals()
    objective = float(form.cost @ values)
    return Answer(status, values, objective, bound, seconds, NAME, duals=duals)


class _Program:
    """The CVXPY problem of a form, with a constraint for each side of its rows."""

    def __init__(self, form: LinearProgram) -> None:
        self.form = form
        self.x = cp.Variable(
            len(form.cost),
            bounds=[form.lower, form.upper],
            integer=np.nonzero(form.integral) if form.integral.any() else False,
        )
        equal = form.row_lower == form.row_upper
        # Rows, their constraint, and the sign of what CVXPY's dual adds to the row's.
        self.sides: list[tuple[Bools, cp.Constraint, float]] = []
        if equal.any():
            self._add(equal, form.matrix[equal] @ self.x == form.row_lower[equal], -1.0)
        least, most = (np.isfinite(limit) & ~equal for limit in (form.row_lower, form.row_upper))
        if least.any():
            self._add(least, form.matrix[least] @ self.x >= form.row_lower[least], 1.0)
        if most.any():
            self._add(most, form.matrix[most] @ self.x <= form.row_upper[most], -1.0)
        constraints = [constraint for _, constraint, _ in self.sides]
        self.problem = cp.Problem(cp.Minimize(form.cost @ self.x), constraints)

    def _add(self, rows: Bools, constraint: cp.Constraint, sign: float) -> None:
        self.sides.append((rows, constraint, sign))

    def duals(self) -> Floats:
        """The dual of each row of the form: the minimum's change per unit of the row's limits."""
        found = np.zeros(len(self.form.row_lower))
        for chosen, constraint, sign in self.sides:
            found[chosen] += sign * np.asarray(constraint.dual_value).reshape(-1)
        return found

    def has_point(self) -> bool:
        """Whether a search that stopped early left a point that satisfies every row."""
        found = self._information().primal_solution_status
        return self.x.value is not None and int(found) == FEASIBLE

    def bound(self, status: Status) -> float:
        """The bound that HiGHS proved."""
        if status in (Status.INFEASIBLE, Status.UNBOUNDED):
            return math.inf if status is Status.INFEASIBLE else -math.inf
        if self.form.integral.any():
            return float(self._information().mip_dual_bound)
        return float(self.problem.value) if status is Status.OPTIMAL else -math.inf

    def _information(self) -> Any:
        """HiGHS's information about its run."""
        assert self.problem.solver_stats is not None
        return self.problem.solver_stats.extra_stats


GAP = 1e-10  # of Clarabel's primal and dual, absolute and relative


def run_convex(form: Convex, limits: Limits, on_progress: OnProgress) -> Answer[Floats]:
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
