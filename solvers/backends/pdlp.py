"""PDLP answers large linear programs by first-order steps (Applegate et al., 2021).

It factorises nothing, so that time grows with the entries of the matrix and memory is theirs, and
it stops at a tolerance instead of a vertex: rows may be violated by ``TOLERANCE`` relative to the
norm of their bounds (see ``violation``), columns never. The bound is recomputed from the duals and
holds however far they are from optimal, if the columns that they lean on have finite bounds.
"""

import math
from time import perf_counter
from typing import Any

import numpy as np
from ortools.pdlp import solve_log_pb2, solvers_pb2
from ortools.pdlp.python import pdlp
from scipy import sparse

from stagewright.formulations.forms.answers import Answer, Limits, OnProgress, Status
from stagewright.formulations.forms.duality import weak_duality_bound
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.backends.backend import UnknownStatusError

TOLERANCE = 1e-8  # of residuals and of the gap, relative to the norms of bounds and costs

STATUS = {
    solve_log_pb2.TERMINATION_REASON_OPTIMAL: Status.OPTIMAL,
    solve_log_pb2.TERMINATION_REASON_PRIMAL_INFEASIBLE: Status.INFEASIBLE,
    solve_log_pb2.TERMINATION_REASON_DUAL_INFEASIBLE: Status.UNBOUNDED,
    # What a limit leaves is not feasible, not even nearly.
    solve_log_pb2.TERMINATION_REASON_TIME_LIMIT: Status.NO_ANSWER,
    solve_log_pb2.TERMINATION_REASON_ITERATION_LIMIT: Status.NO_ANSWER,
    solve_log_pb2.TERMINATION_REASON_KKT_MATRIX_PASS_LIMIT: Status.NO_ANSWER,
}
_BOUND = {Status.INFEASIBLE: math.inf, Status.UNBOUNDED: -math.inf}


def run(form: LinearProgram, limits: Limits, on_progress: OnProgress) -> Answer[Floats]:
    """Minimise ``form`` to ``TOLERANCE``; ``log`` says by how much its values miss rows.

    ``limits.threads`` is used, ``limits.seed`` is not: there is no chance in PDLP.

    Raises
    ------
    InputError
        If the form has integers.
    """
    if form.integral.any():
        raise InputError("backend 'pdlp' takes no integers; use highs, pulp-highs or pulp-cbc")
    began = perf_counter()
    found: Any = pdlp.primal_dual_hybrid_gradient(_program(form), _parameters(limits))
    status = status_of(found.solve_log.termination_reason)
    if status is Status.UNBOUNDED and not _is_feasible(form, limits):
        status = Status.INFEASIBLE
    duals = np.array(found.dual_solution)
    if status is not Status.OPTIMAL:
        bound = _BOUND.get(status)
        bound = weak_duality_bound(form, duals) if bound is None else bound
        return Answer(status, None, None, bound, perf_counter() - began, "pdlp")
    values = np.clip(found.primal_solution, form.lower, form.upper)
    return Answer(
        status,
        values,
        float(form.cost @ values),
        weak_duality_bound(form, duals),
        perf_counter() - began,
        "pdlp",
        f"{found.solve_log.iteration_count} iterations; rows are violated by up to "
        f"{violation(form, values):.3g}",
        duals=duals,
    )


def status_of(reason: int) -> Status:
    """The status of a reason for PDLP's termination.

    Raises
    ------
    UnknownStatusError
        If the table does not list it.
    """
    if reason not in STATUS:
        raise UnknownStatusError(f"PDLP ended with {solve_log_pb2.TerminationReason.Name(reason)}")
    return STATUS[reason]


def violation(form: LinearProgram, values: Floats) -> float:
    """The largest distance of a row or column from a bound b, in units of max(1, abs(b))."""
    rows = form.matrix @ values
    worst = 0.0
    for bound, beyond in (
        (form.row_lower, form.row_lower - rows),
        (form.row_upper, rows - form.row_upper),
        (form.lower, form.lower - values),
        (form.upper, values - form.upper),
    ):
        finite = np.isfinite(bound)
        relative = beyond[finite] / np.maximum(1.0, np.abs(bound[finite]))
        worst = max(worst, float(relative.max(initial=0.0)))
    return worst


def _is_feasible(form: LinearProgram, limits: Limits) -> bool:
    """Whether a form whose dual is infeasible has a point, which shows without costs."""
    program = _program(form)
    program.objective_vector = np.zeros(len(form.cost))
    found: Any = pdlp.primal_dual_hybrid_gradient(program, _parameters(limits))
    return status_of(found.solve_log.termination_reason) is Status.OPTIMAL


def _program(form: LinearProgram) -> pdlp.QuadraticProgram:
    program = pdlp.QuadraticProgram()
    program.objective_vector = form.cost
    program.constraint_matrix = sparse.csc_matrix(form.matrix)
    program.constraint_lower_bounds = form.row_lower
    program.constraint_upper_bounds = form.row_upper
    program.variable_lower_bounds = form.lower
    program.variable_upper_bounds = form.upper
    return program


def _parameters(limits: Limits) -> solvers_pb2.PrimalDualHybridGradientParams:
    parameters = solvers_pb2.PrimalDualHybridGradientParams()
    parameters.num_threads = limits.threads
    criteria = parameters.termination_criteria
    criteria.time_sec_limit = limits.seconds
    criteria.simple_optimality_criteria.eps_optimal_absolute = TOLERANCE
    criteria.simple_optimality_criteria.eps_optimal_relative = TOLERANCE
    return parameters
