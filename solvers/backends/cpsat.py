"""CP-SAT answers ``Intervals``, and a ``LinearProgram`` that is all integers."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from ortools.sat.python import cp_model

from stagewright.formulations.forms.answers import Answer, Limits, OnProgress, Progress, Status
from stagewright.formulations.forms.models import ABSENT, HeldAmounts, Intervals, LinearProgram
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.backends.backend import UnknownStatusError

T = TypeVar("T")

LOOK_SECONDS = 0.1  # interval between checks of the stop token


def run_stoppable(call: Callable[[], T], halt: Callable[[], object], limits: Limits) -> T:
    """The result of ``call``, which ``halt`` ends early once ``limits`` says stop.

    The call runs in another thread, so that this one can react: signals are handled while it waits,
    and a KeyboardInterrupt halts the call and is raised.
    """
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(call)
        try:
            while not wait([running], LOOK_SECONDS).done:
                if limits.stopped():
                    halt()
            return running.result()
        finally:
            while not wait([running], LOOK_SECONDS).done:
                halt()  # repeatedly: a solver that is still starting ignores it


STATUS = {
    cp_model.OPTIMAL: Status.OPTIMAL,
    cp_model.FEASIBLE: Status.FEASIBLE,
    cp_model.INFEASIBLE: Status.INFEASIBLE,
    cp_model.UNKNOWN: Status.NO_ANSWER,
}

_INFINITE = 2**62  # an infinite limit of a row

# The searches that prove disjunctive problems quickly come first; CP-SAT's own order leaves two
# threads with one proof that is slow on them. One thread runs the default search without LP, which
# disjunctions gain little from.
SEARCHES = (
    "no_lp", "objective_lb_search", "quick_restart_no_lp", "core", "default_lp", "max_lp",
    "probing", "pseudo_costs",
)  # fmt: skip


def run(form: Intervals, limits: Limits, on_progress: OnProgress) -> Answer[Ints]:
    """Minimise the makespan of ``form``; its horizon and lower bound become constraints."""
    began = perf_counter()
    model, starts = build(form)
    solver = cp_model.CpSolver()
    solver.parameters.subsolvers.extend(SEARCHES)
    if limits.threads == 1:
        solver.parameters.linearization_level = 0
    answer = run_model(model, starts, solver, limits, on_progress, began)
    if answer.status is Status.INFEASIBLE:
        return answer
    return replace(answer, bound=max(float(form.lower_bound), answer.bound))


def run_integers(form: LinearProgram, limits: Limits, on_progress: OnProgress) -> Answer[Floats]:
    """Minimise ``form``, whose numbers must all be integers and whose columns have limits.

    Raises
    ------
    InputError
        If something is not an integer, or a column has no limit.
    """
    began = perf_counter()
    if (form.lower > form.upper).any():  # which CP-SAT calls an invalid model
        seconds = perf_counter() - began
        return Answer(Status.INFEASIBLE, None, None, math.inf, seconds, "cp-sat")
    model, columns = _build_integers(form)
    answer = run_model(model, columns, cp_model.CpSolver(), limits, on_progress, began)
    values = None if answer.values is None else answer.values.astype(float)
    return replace(answer, values=values)


def run_model(
    model: cp_model.CpModel,
    columns: list[cp_model.IntVar],
    solver: cp_model.CpSolver,
    limits: Limits,
    on_progress: OnProgress,
    began: float,
) -> Answer[Any]:
    """Run ``solver`` within ``limits`` and read its answer."""
    solver.parameters.num_workers = limits.threads
    solver.parameters.random_seed = limits.seed
    solver.parameters.log_search_progress = True
    solver.parameters.log_to_stdout = False
    solver.parameters.catch_sigint_signal = False  # it would not get to Python
    log: list[str] = []
    solver.log_callback = log.append
    watch = _Watch(began, on_progress)
    solver.best_bound_callback = watch.bound
    solver.parameters.max_time_in_seconds = max(0.0, limits.seconds - (perf_counter() - began))
    code = run_stoppable(lambda: solver.solve(model, watch), solver.stop_search, limits)
    if code not in STATUS:
        raise UnknownStatusError(
            f"CP-SAT ended with {solver.status_name(code)}: {model.validate()}"
        )
    status = STATUS[code]
    values, objective, bound = None, None, math.inf
    if status is not Status.INFEASIBLE:
        bound = solver.best_objective_bound
    if status in (Status.OPTIMAL, Status.FEASIBLE):
        values = np.array([solver.value(column) for column in columns], dtype=np.int64)
        objective = solver.objective_value
    seconds = perf_counter() - began
    text, progress = "\n".join(log), tuple(watch.progress)
    return Answer(status, values, objective, bound, seconds, "cp-sat", text, progress)


def build(form: Intervals) -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    """The CP-SAT model of ``form``, and the start variables in the order of its intervals."""
    model = cp_model.CpModel()
    durations = form.durations.tolist()
    starts = [model.new_int_var(0, form.horizon, "") for _ in durations]
    present = _add_choices(model, starts, form)
    makespan = model.new_int_var(0, form.horizon, "makespan")
    model.add(makespan >= form.lower_bound)
    for machine in form.machines:
        model.add_no_overlap(
            model.new_optional_fixed_size_interval_var(
                starts[i], durations[i], present.get(i, True), ""
            )
            for i in machine.tolist()
        )
    for i, j in form.before.tolist():
        _if(present.get(i), model.add(starts[j] >= starts[i] + durations[i]))
    for store in form.stores:
        _add_store(model, starts, form, store)
    _add_objective(model, starts, present, makespan, form)
    if form.hint is not None:
        _add_hint(model, starts, present, form.hint.tolist())
        model.add_hint(makespan, _objective(form, form.hint))
    model.minimize(makespan)
    return model, _with_absent(model, starts, present, form.horizon)


def _add_choices(
    model: cp_model.CpModel, starts: list[cp_model.IntVar], form: Intervals
) -> dict[int, cp_model.IntVar]:
    """Whether each interval of a choice is present; all start together with the first interval."""
    present: dict[int, cp_model.IntVar] = {}
    for choice in form.choices:
        members = choice.tolist() if len(choice) > 1 else []
        for i in members:
            starts[i], present[i] = starts[members[0]], model.new_bool_var("")
        if members:
            model.add_exactly_one([present[i] for i in members])
    return present


def _if(literal: cp_model.IntVar | None, constraint: cp_model.Constraint) -> None:
    """Enforce a constraint only where ``literal``, if given, is true."""
    if literal is not None:
        constraint.only_enforce_if(literal)


def _add_hint(
    model: cp_model.CpModel,
    starts: list[cp_model.IntVar],
    present: dict[int, cp_model.IntVar],
    values: list[int],
) -> None:
    for i, value in enumerate(values):
        if value != ABSENT:
            model.add_hint(starts[i], value)
        if i in present:
            model.add_hint(present[i], value != ABSENT)


def _with_absent(
    model: cp_model.CpModel,
    starts: list[cp_model.IntVar],
    present: dict[int, cp_model.IntVar],
    horizon: int,
) -> list[cp_model.IntVar]:
    """The start of every interval, or ``ABSENT``."""
    columns = list(starts)
    for i, literal in present.items():
        columns[i] = model.new_int_var(ABSENT, horizon, "")
        model.add(columns[i] == starts[i]).only_enforce_if(literal)
        model.add(columns[i] == ABSENT).only_enforce_if(~literal)
    return columns


def _add_objective(
    model: cp_model.CpModel,
    starts: list[cp_model.IntVar],
    present: dict[int, cp_model.IntVar],
    objective: cp_model.IntVar,
    form: Intervals,
) -> None:
    after = (form.durations + form.tails).tolist()
    if form.spans is not None:
        for i, j in form.spans.tolist():
            model.add(objective >= starts[j] + after[j] - starts[i])
        return
    # An interval without tail ends before its successors do: only the others bound the makespan.
    followed = set(form.before[:, 0].tolist())
    for i, tail in enumerate(form.tails.tolist()):
        if tail or i not in followed:
            _if(present.get(i), model.add(objective >= starts[i] + after[i]))


def _objective(form: Intervals, starts: Ints) -> int:
    ends = starts + form.durations + form.tails
    if form.spans is not None:
        ends = ends[form.spans[:, 1]] - starts[form.spans[:, 0]]
    else:
        ends = ends[starts != ABSENT]
    return int(ends.max(initial=0))


def _add_store(
    model: cp_model.CpModel, starts: list[cp_model.IntVar], form: Intervals, store: HeldAmounts
) -> None:
    held = []
    for i, j in zip(store.first.tolist(), store.last.tolist(), strict=True):
        length = model.new_int_var(0, form.horizon, "")
        end = starts[j] + int(form.durations[j])
        held.append(model.new_interval_var(starts[i], length, end, ""))
    model.add_cumulative(held, store.amounts.tolist(), store.capacity)


def _build_integers(form: LinearProgram) -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    """The CP-SAT model of an integer program, and its variables in the order of the columns."""
    limits = (form.row_lower, form.row_upper, form.lower, form.upper)
    figures = np.concatenate([form.cost, form.matrix.data, *limits])
    finite = figures[np.isfinite(figures)]
    if not form.integral.all() or (finite != np.round(finite)).any():
        raise InputError("CP-SAT takes a linear program only if all of it is integers")
    if not (np.isfinite(form.lower).all() and np.isfinite(form.upper).all()):
        raise InputError("CP-SAT takes a linear program only if every column has two limits")
    model = cp_model.CpModel()
    columns = [
        model.new_int_var(_whole(lower), _whole(upper), "")
        for lower, upper in zip(form.lower.tolist(), form.upper.tolist(), strict=True)
    ]
    pointers, indices = form.matrix.indptr.tolist(), form.matrix.indices.tolist()
    data = form.matrix.data.tolist()
    for row, (lower, upper) in enumerate(
        zip(form.row_lower.tolist(), form.row_upper.tolist(), strict=True)
    ):
        entries = range(pointers[row], pointers[row + 1])
        terms = [columns[indices[e]] for e in entries]
        value = cp_model.LinearExpr.weighted_sum(terms, [int(data[e]) for e in entries])
        model.add_linear_constraint(value, _whole(lower), _whole(upper))
    if form.hint is not None:
        for column, hinted in zip(columns, form.hint.tolist(), strict=True):
            model.add_hint(column, round(hinted))
    if form.cost.any():
        costs = [int(cost) for cost in form.cost.tolist()]
        model.minimize(cp_model.LinearExpr.weighted_sum(columns, costs))
    return model, columns


def _whole(limit: float) -> int:
    """A limit in CP-SAT's form; infinite ones are far outside of the range of values."""
    if math.isinf(limit):
        return int(math.copysign(_INFINITE, limit))
    return int(limit)


class _Watch(cp_model.CpSolverSolutionCallback):
    """Keeps and reports every improvement."""

    def __init__(self, began: float, on_progress: OnProgress) -> None:
        super().__init__()
        self._began, self._on_progress = began, on_progress
        self.progress: list[Progress] = []

    def bound(self, bound: float) -> None:
        """Report a better bound between two improvements."""
        self._on_progress(Progress(perf_counter() - self._began, None, bound))

    def on_solution_callback(self) -> None:
        seconds = perf_counter() - self._began
        step = Progress(seconds, self.objective_value, self.best_objective_bound)
        self.progress.append(step)
        self._on_progress(step)
