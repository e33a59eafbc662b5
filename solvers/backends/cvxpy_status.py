"""The status of a solve through CVXPY."""

import warnings
from typing import Any

import cvxpy as cp

from stagewright.formulations.forms.answers import Limits, Status
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

    Raises
    ------
    UnknownStatusError
        If CVXPY reports a status that the table does not list.
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
