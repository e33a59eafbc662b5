"""HiGHS answers ``LinearProgram``, handed over as sparse arrays."""

import math
from time import perf_counter
from typing import Any

import highspy
import numpy as np

from stagewright.formulations.forms.answers import Answer, Limits, OnProgress, Progress, Status
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.backends.backend import UnknownStatusError

_CODE = highspy.HighsModelStatus
STATUS = {
    _CODE.kOptimal: Status.OPTIMAL,
    _CODE.kModelEmpty: Status.OPTIMAL,
    _CODE.kInfeasible: Status.INFEASIBLE,
    _CODE.kUnbounded: Status.UNBOUNDED,
    _CODE.kTimeLimit: Status.NO_ANSWER,
    _CODE.kIterationLimit: Status.NO_ANSWER,
    _CODE.kSolutionLimit: Status.NO_ANSWER,
    _CODE.kInterrupt: Status.NO_ANSWER,
}
_BOUND = {Status.INFEASIBLE: math.inf, Status.UNBOUNDED: -math.inf}


def run_interior(form: LinearProgram, limits: Limits, on_progress: OnProgress) -> Answer[Floats]:
    """Minimise ``form`` by interior points, without crossover: a central optimum.

    What the optimum leaves open is spread, where a vertex would leave it idle.
    """
    return run(form, limits, on_progress, solver="ipm", run_crossover="off")


def run(
    form: LinearProgram, limits: Limits, on_progress: OnProgress, **options: str
) -> Answer[Floats]:
    """Minimise ``form``; an integer optimum is proved to HiGHS's absolute gap of 1e-6.

    All of HiGHS in one process shares one pool of threads: more than one thread in ``limits``
    lets it use the pool, whose size is HiGHS's own choice.
    """
    began = perf_counter()
    solver: Any = highspy.Highs()
    _configure(solver, limits)
    for option, value in options.items():
        solver.setOptionValue(option, value)
    log: list[str] = []
    progress: list[Progress] = []

    def improved(event: Any) -> None:
        found = event.data_out
        step = Progress(
            perf_counter() - began, found.objective_function_value, found.mip_dual_bound
        )
        progress.append(step)
        on_progress(step)

    solver.cbLogging.subscribe(lambda event: log.append(event.message))
    solver.cbMipImprovingSolution.subscribe(improved)
    if limits.stop is not None:
        _watch(solver, limits)
    solver.passModel(_model(form))
    if form.hint is not None:
        hint = highspy.HighsSolution()
        hint.col_value = form.hint
        solver.setSolution(hint)
    solver.run()
    if solver.getModelStatus() == _CODE.kUnknown and "run_crossover" in options:
        # Interior points alone only came close: the crossover to a vertex settles it.
        solver.setOptionValue("run_crossover", "on")
        solver.run()
    information = solver.getInfo()
    objective, dual_bound = information.objective_function_value, information.mip_dual_bound
    solution = solver.getSolution()
    found = np.array(solution.col_value)
    status = _status_of(solver)
    solved = status in (Status.OPTIMAL, Status.FEASIBLE)
    bound = dual_bound if form.integral.any() else -math.inf
    if status is Status.OPTIMAL and not form.integral.any():
        bound = objective
    return Answer(
        status,
        found if solved else None,
        objective if solved else None,
        _BOUND.get(status, bound),
        perf_counter() - began,
        "-".join(["highs", *(value for value in options.values() if value != "off")]),
        "".join(log),
        tuple(progress),
        np.array(solution.row_dual) if solved and not form.integral.any() else None,
    )


def _status_of(solver: highspy.Highs) -> Status:
    """How the run of ``solver`` ended, after the solution was read.

    If presolve could not tell infeasible from unbounded, the model is run again without costs.
    """
    code = solver.getModelStatus()
    if code == _CODE.kUnboundedOrInfeasible:
        columns = solver.getNumCol()
        solver.changeColsCost(columns, np.arange(columns, dtype=np.int32), np.zeros(columns))
        solver.run()
        feasible = _status_of(solver)
        return Status.UNBOUNDED if feasible is Status.OPTIMAL else feasible
    if code not in STATUS:
        raise UnknownStatusError(f"HiGHS ended with {solver.modelStatusToString(code)}")
    if STATUS[code] is Status.NO_ANSWER and _has_solution(solver):
        return Status.FEASIBLE
    return STATUS[code]


def _has_solution(solver: highspy.Highs) -> bool:
    """Whether ``solver`` holds a point that satisfies every constraint."""
    feasible = highspy.SolutionStatus.kSolutionStatusFeasible
    return bool(solver.getInfo().primal_solution_status == feasible)


def _watch(solver: Any, limits: Limits) -> None:
    """Look at the stop token between iterations; slow where iterations are short."""

    def look(event: Any) -> None:
        if limits.stopped():
            event.interrupt()

    for callback in (solver.cbSimplexInterrupt, solver.cbIpmInterrupt, solver.cbMipInterrupt):
        callback.subscribe(look)


def _configure(solver: highspy.Highs, limits: Limits) -> None:
    solver.setOptionValue("log_to_console", False)
    solver.setOptionValue("time_limit", float(limits.seconds))
    solver.setOptionValue("random_seed", limits.seed)
    solver.setOptionValue("parallel", "on" if limits.threads > 1 else "off")
    solver.setOptionValue("mip_rel_gap", 0.0)


def _model(form: LinearProgram) -> highspy.HighsLp:
    model = highspy.HighsLp()
    model.num_row_, model.num_col_ = form.matrix.shape
    model.col_cost_, model.col_lower_, model.col_upper_ = form.cost, form.lower, form.upper
    model.row_lower_, model.row_upper_ = form.row_lower, form.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = form.matrix.indptr
    model.a_matrix_.index_ = form.matrix.indices
    model.a_matrix_.value_ = form.matrix.data
    if form.integral.any():
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[integral] for integral in form.integral.astype(int)]
    return model
