"""CBC answers ``LinearProgram`` through PuLP: a second solver to the same optimum.

PuLP's status reads "Optimal" also for a run that stopped at its time limit; what was proved stands
in ``sol_status``.
"""

import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import pulp

from stagewright.formulations.forms.answers import Answer, Limits, OnProgress, Status
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.backends.backend import UnknownStatusError

# (status, sol_status) as PuLP's reader of CBC's solution file gives them.
CBC_STATUS = {
    (pulp.LpStatusOptimal, pulp.LpSolutionOptimal): Status.OPTIMAL,
    (pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible): Status.FEASIBLE,
    (pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible): Status.INFEASIBLE,
    (pulp.LpStatusUnbounded, pulp.LpSolutionUnbounded): Status.UNBOUNDED,
    (pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound): Status.NO_ANSWER,
    (pulp.LpStatusInfeasible, pulp.LpSolutionNoSolutionFound): Status.INFEASIBLE,
}
_TOLERANCE = 1e-5  # of rows, bounds and integrality, relative to the size of the number
_Sides = list[tuple[int, pulp.LpConstraint]]  # of which row, and the constraint
_INTEGER = (pulp.LpContinuous, pulp.LpInteger)


def run(form: LinearProgram, limits: Limits, on_progress: OnProgress) -> Answer[Floats]:
    """CBC through PuLP; no progress is reported, and only an optimal answer has a bound."""
    began = perf_counter()
    problem, columns, sides = _problem(form)
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        problem.solve(
            pulp.COIN_CMD(
                path=pulp.PULP_CBC_CMD.pulp_cbc_path,  # the CBC that comes with PuLP
                msg=False,
                timeLimit=limits.seconds,
                threads=limits.threads if limits.threads > 1 else None,
                warmStart=form.hint is not None,
                # CBC reads seed 0 as the time of day.
                options=[f"randomCbcSeed {limits.seed + 1}"],
                logPath=str(log),
            )
        )
        text = log.read_text()
    code = (problem.status, problem.sol_status)
    if code not in CBC_STATUS:
        raise UnknownStatusError(f"CBC through PuLP ended with status, sol_status = {code}")
    seconds = perf_counter() - began
    answer = _answer(form, columns, CBC_STATUS[code], seconds, text)
    return replace(answer, duals=_duals(form, sides, answer))


def _problem(form: LinearProgram) -> tuple[pulp.LpProblem, list[pulp.LpVariable], _Sides]:
    problem = pulp.LpProblem("problem", pulp.LpMinimize)
    columns = [
        problem.add_variable(f"x{j}", _finite(lower), _finite(upper), _INTEGER[int(integral)])
        for j, (lower, upper, integral) in enumerate(
            zip(form.lower.tolist(), form.upper.tolist(), form.integral.tolist(), strict=True)
        )
    ]
    if form.hint is not None:
        for column, value in zip(columns, form.hint.tolist(), strict=True):
            column.setInitialValue(value)
    # Zero costs included: PuLP knows only the variables that it meets somewhere.
    problem += pulp.LpAffineExpression(list(zip(columns, form.cost.tolist(), strict=True)))
    pointers, indices = form.matrix.indptr.tolist(), form.matrix.indices.tolist()
    data = form.matrix.data.tolist()
    sides: _Sides = []
    for row, (lower, upper) in enumerate(
        zip(form.row_lower.tolist(), form.row_upper.tolist(), strict=True)
    ):
        entries = range(pointers[row], pointers[row + 1])
        terms = [(columns[indices[e]], data[e]) for e in entries]
        for sense, side in _sides(lower, upper):
            constraint = pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=side)
            problem += constraint
            sides.append((row, constraint))
    return problem, columns, sides


def _duals(form: LinearProgram, sides: _Sides, answer: Answer[Floats]) -> Floats | None:
    """The dual of each row, summed over its sides; None with integers or without an optimum."""
    if form.integral.any() or answer.status is not Status.OPTIMAL:
        return None
    found = np.zeros(len(form.row_lower))
    for row, constraint in sides:
        found[row] += constraint.pi or 0.0
    return found


def _sides(lower: float, upper: float) -> list[tuple[int, float]]:
    """The one or two constraints of a row: PuLP has no row with two different limits."""
    if lower == upper:
        return [(pulp.LpConstraintEQ, lower)]
    sides = [(pulp.LpConstraintGE, lower), (pulp.LpConstraintLE, upper)]
    return [(sense, side) for sense, side in sides if math.isfinite(side)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _answer(
    form: LinearProgram, columns: list[pulp.LpVariable], status: Status, seconds: float, log: str
) -> Answer[Floats]:
    """The answer, with the objective recomputed from the values."""
    values = np.array([column.varValue or 0.0 for column in columns])
    if status is Status.FEASIBLE and not _satisfies(form, values):
        status = Status.NO_ANSWER  # stopped inside the first relaxation
    if status not in (Status.OPTIMAL, Status.FEASIBLE):
        bound = math.inf if status is Status.INFEASIBLE else -math.inf
        return Answer(status, None, None, bound, seconds, "pulp-cbc", log)
    objective = float(form.cost @ values)
    bound = objective if status is Status.OPTIMAL else -math.inf
    return Answer(status, values, objective, bound, seconds, "pulp-cbc", log)


def _satisfies(form: LinearProgram, values: Floats) -> bool:
    rows, slack = form.matrix @ values, _TOLERANCE * max(1.0, float(np.abs(values).max(initial=0)))
    return bool(
        (rows >= form.row_lower - slack).all()
        and (rows <= form.row_upper + slack).all()
        and (values >= form.lower - slack).all()
        and (values <= form.upper + slack).all()
        and (np.abs(values - values.round())[form.integral] <= _TOLERANCE).all()
    )
