"""Solve the makespan problem: list schedules, local search, search in windows, then CP-SAT.

With memory, or for the longest span: published schedules, search for the rows of devices, and
CP-SAT if the problem is small.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal

import numpy as np

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress, Status, silent
from stagewright.formulations.pipelines.bounds.stages import plans_of, schedule_bounds
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable, memory_excess
from stagewright.formulations.pipelines.makespan_models import ByIntervals
from stagewright.formulations.pipelines.windows import WINDOWS, order_of_times
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.formulations.schedules.order import Order, line, placed, v_shape
from stagewright.formulations.schedules.published.automatic import automatic
from stagewright.formulations.schedules.published.kinds import KINDS, PLACEMENTS, Sizes, schedule_of
from stagewright.formulations.schedules.published.zbv import automatic_v
from stagewright.formulations.schedules.timing import ActivationMemory, StageTimes
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.solvers.backends.backend import scheduler, solve_intervals
from stagewright.solvers.pipelines.forward_backward import improve
from stagewright.solvers.pipelines.list_scheduling import best_list_schedule, list_schedule
from stagewright.solvers.pipelines.rows.search import RowSearch, compile_row_kernels, run_together
from stagewright.solvers.pipelines.windows.search import compile_window_kernels, search_windows


def generated(problem: MakespanProblem) -> Iterator[tuple[str, Order]]:
    """Name and order of every published schedule with the problem's placement, limits and splits.

    The heuristics for any memory come first.
    """
    for name, order in _candidates(problem):
        if order.is_split and not problem.is_split:
            continue
        fitting = order.split() if problem.is_split else order
        if _keeps_limits(problem, fitting):
            yield name, fitting


def _candidates(problem: MakespanProblem) -> Iterator[tuple[str, Order]]:
    count, path, devices = problem.microbatches, problem.device, 1 + max(problem.device)
    times = None
    if problem.weight_gradient is not None:
        times = StageTimes(
            problem.forward, problem.backward, problem.weight_gradient,
            problem.send_forward, problem.send_backward,
        )  # fmt: skip
        memory = _activations(problem)
        heuristics = {line(devices): automatic, v_shape(devices): automatic_v}
        if path in heuristics:
            heuristic = heuristics[path]
            yield "zero-bubble heuristic", heuristic(times, count, memory, problem.objective)
    chunks, left = divmod(problem.stages, devices)
    for name, kind in KINDS.items():
        if left or kind.weights != "flush" or not kind.chunks.allows(chunks):
            continue
        if kind.placement not in PLACEMENTS or placed(kind.placement, devices, chunks) != path:
            continue
        try:
            yield name, schedule_of(name, Sizes(devices, count, chunks, times=times))
        except InputError:
            continue  # there is none of these sizes


def _activations(problem: MakespanProblem) -> ActivationMemory:
    """The problem's memory; without it, its microbatches."""
    if problem.memory:
        taken, _, late = zip(*problem.saved, strict=True)
        kept = tuple(map(min, taken, late))  # they may differ by rounding
        return ActivationMemory(taken, kept, problem.memory)
    ones = (1.0,) * problem.stages
    limit = float(problem.microbatches * problem.stages)
    return ActivationMemory(ones, ones, (limit,) * (1 + max(problem.device)))


def _keeps_limits(problem: MakespanProblem, order: Order) -> bool:
    """Whether the rows stay within memory and in-flight limits, whatever their times."""
    flying = zip(order.most_in_flight(), problem.in_flight, strict=True)
    if any(most > limit for most, limit in flying):
        return False
    if not problem.memory:
        return True
    peaks = zip(_activations(problem).peaks(order), problem.memory, strict=True)
    return all(peak <= limit * (1 + RELATIVE_TOLERANCE) for peak, limit in peaks)


ScheduleKind = Literal["gpipe", "1f1b", "pe", "optimal"]

# Shares of the time limit after which the next method takes over.
IMPROVEMENT = 0.05
SEARCH = 0.9
ROWS = 0.5
_ROW_SECONDS = 0.02  # at most, per computation, of the search for rows before CP-SAT

SMALL = 1000  # computations up to which CP-SAT helps where memory counts


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleResult:
    """A checked schedule with its bound and gap; times in the problem's unit.

    ``timetable``, ``cost`` and ``gap`` are None if the kind of schedule is not possible with the
    mapping, the in-flight limits or the memory. ``bound`` is the largest of ``bounds``, ``gap`` is
    (cost - bound) / cost. ``source`` names the method that found the timetable. ``rounding`` is the
    time by which CP-SAT's ticks underestimate its schedule.
    """

    timetable: Timetable | None
    cost: float | None
    bound: float
    proved_by: str
    bounds: tuple[Bound, ...]
    gap: float | None
    status: Status
    source: str
    seconds: float
    rounding: float = 0.0
    log: str = ""
    progress: tuple[Progress, ...] = ()


def solve_schedule(
    problem: MakespanProblem,
    kind: ScheduleKind,
    limits: Limits,
    on_progress: OnProgress = silent,
    incumbent: Timetable | None = None,
) -> ScheduleResult:
    """The schedule of one rule, or the best schedule found within ``limits``.

    An ``"optimal"`` schedule is never worse than any list schedule or ``incumbent``, which are
    checked first. The search ends when its cost equals a bound. It uses CP-SAT unless ``limits``
    names another backend; the others are for small cases.

    Raises InputError if there is no such backend. Raises InvalidPlan if a schedule breaks a rule of
    the problem.
    """
    began = perf_counter()
    scheduler(limits)  # refuses an unknown backend before any work
    bounds = schedule_bounds(problem)
    if kind != "optimal":
        timetable = list_schedule(problem, kind)
        if timetable is not None and memory_excess(problem, timetable) is not None:
            timetable = None
        return _result(problem, timetable, kind, bounds, perf_counter() - began)
    steps: list[Progress] = []

    def note(step: Progress) -> None:
        steps.append(step)
        on_progress(step)

    is_for_rows = bool(problem.memory) or problem.objective == "span"
    if is_for_rows:
        found = _by_rows(problem, incumbent, bounds, limits, began, note)
    else:
        found = _by_blocks(problem, incumbent, bounds, limits, began, note)
    if found.status is not Status.OPTIMAL and (not is_for_rows or is_small(problem)):
        found = _proved(problem, found, limits, began, note)
    status = found.status if found.status is Status.OPTIMAL else limits.status(found=True)
    return replace(found, status=status, seconds=perf_counter() - began, progress=tuple(steps))


def _by_rows(
    problem: MakespanProblem,
    incumbent: Timetable | None,
    bounds: tuple[Bound, ...],
    limits: Limits,
    began: float,
    note: OnProgress,
) -> ScheduleResult:
    """The best of published schedules, ``incumbent``, and the rows found in a share of the time."""
    compile_row_kernels()
    known = np.inf if incumbent is None else problem.evaluate(incumbent)
    best = max(bound.seconds for bound in bounds)

    def better(cost: float) -> None:
        if cost < known:
            note(Progress(perf_counter() - began, cost, min(best, cost)))

    search, source = RowSearch(problem, limits.seed, better), "eager"
    _begin(search, incumbent)

    def result(source: str) -> ScheduleResult:
        timetable = search.timetable()
        if incumbent is not None and known <= timetable.cost(problem):
            source, timetable = "incumbent", incumbent
        return _result(problem, timetable, source, bounds, perf_counter() - began)

    found = result(source)
    note(_step(found))
    target = found.bound * (1 + RELATIVE_TOLERANCE)
    for name, order in generated(problem):
        source = name if search.offer(order) else source
        if search.cost <= target or limits.left(perf_counter() - began) <= 0:
            break
    found = result(source)
    note(_step(found))
    if found.status is not Status.OPTIMAL:
        left = replace(limits, seconds=_row_seconds(problem, limits.left(perf_counter() - began)))
        before = search.cost
        run_together(search, target, left)
        found = result(source if search.cost == before else "search for rows")
        note(_step(found))
    return found


def _row_seconds(problem: MakespanProblem, left: float) -> float:
    """The time for rows; CP-SAT needs the rest if it helps."""
    if not is_small(problem):
        return left
    return min(ROWS * left, _ROW_SECONDS * computations(problem))


def _begin(search: RowSearch, incumbent: Timetable | None) -> None:
    """Offer a first schedule, and the order of one that is known."""
    search.first()
    if incumbent is not None:
        search.offer(order_of_times(search.problem, incumbent))


def is_small(problem: MakespanProblem) -> bool:
    """Whether CP-SAT helps where memory counts."""
    return computations(problem) <= SMALL


def computations(problem: MakespanProblem) -> int:
    """Number of computations of all stages."""
    return problem.stages * problem.microbatches * (2 + problem.is_split)


def _by_blocks(
    problem: MakespanProblem,
    incumbent: Timetable | None,
    bounds: tuple[Bound, ...],
    limits: Limits,
    began: float,
    note: OnProgress,
) -> ScheduleResult:
    """List schedules, improved forward and backward, then searched in windows."""
    found = _first(problem, incumbent, bounds, began)
    note(_step(found))
    if found.status is not Status.OPTIMAL:
        found = _improved(problem, found, limits, began)
        note(_step(found))
    if found.status is not Status.OPTIMAL and _is_for_windows(problem, limits):
        found = _searched(problem, found, limits, began)
        note(_step(found))
    return found


def given_schedule(
    problem: MakespanProblem, timetable: Timetable | None, source: str
) -> ScheduleResult:
    """The result of a timetable of any ``source``, checked, with the bounds of the problem.

    Raises InvalidPlan if the timetable breaks a rule of the problem.
    """
    began = perf_counter()
    bounds = schedule_bounds(problem)
    return _result(problem, timetable, source, bounds, perf_counter() - began)


def _first(
    problem: MakespanProblem, incumbent: Timetable | None, bounds: tuple[Bound, ...], began: float
) -> ScheduleResult:
    """The best list schedule, or the incumbent if it is better."""
    source: str
    source, timetable = best_list_schedule(problem)
    if incumbent is not None and problem.evaluate(incumbent) < timetable.makespan(problem):
        source, timetable = "incumbent", incumbent
    return _result(problem, timetable, source, bounds, perf_counter() - began)


def _improved(
    problem: MakespanProblem, found: ScheduleResult, limits: Limits, began: float
) -> ScheduleResult:
    """Improve the schedule forward and backward for a share of the time limit."""
    assert found.timetable is not None
    target = found.bound * (1 + RELATIVE_TOLERANCE)
    share = replace(limits, seconds=IMPROVEMENT * limits.seconds)
    left = replace(limits, seconds=share.left(perf_counter() - began))
    timetable = improve(problem, found.timetable, target, left)
    better = _result(problem, timetable, "forward-backward", found.bounds, perf_counter() - began)
    return better if _cost(better) < _cost(found) else found


def _is_for_windows(problem: MakespanProblem, limits: Limits) -> bool:
    """Whether the search in windows applies: to whole backwards, if no other solver is named."""
    return limits.backend is None and not problem.is_split and problem.duplex == "half"


def _searched(
    problem: MakespanProblem, found: ScheduleResult, limits: Limits, began: float
) -> ScheduleResult:
    """Search in windows for a share of the time limit, for a better schedule and a better bound."""
    share = replace(limits, seconds=SEARCH * limits.seconds)
    left = replace(limits, seconds=share.left(perf_counter() - began))
    compile_window_kernels()
    answer = search_windows(problem, _cost(found), found.bound, left)
    bounds = (*found.bounds, Bound(answer.bound, WINDOWS, "schedule", plans_of(problem)))
    timetable, source = found.timetable, found.source
    if answer.timetable is not None:
        timetable, source = answer.timetable, WINDOWS
    return _result(problem, timetable, source, bounds, perf_counter() - began)


def _proved(
    problem: MakespanProblem, found: ScheduleResult, limits: Limits, began: float, note: OnProgress
) -> ScheduleResult:
    """Run a solver for the remaining time, for a better schedule, a better bound, or both."""
    assert found.timetable is not None
    model = ByIntervals(problem, found.timetable)
    form = model.apply()
    start = perf_counter() - began
    left = limits.left(start)

    def seconds(step: Progress) -> None:
        objective = None if step.objective is None else step.objective * model.unit
        note(Progress(start + step.seconds, objective, step.bound * model.unit))

    answer = solve_intervals(form, replace(limits, seconds=left), seconds)
    solver = scheduler(limits).solver
    proved = Bound(answer.bound * model.unit, solver, "schedule", plans_of(problem))
    bounds = (*found.bounds, proved)
    timetable, source, rounding = found.timetable, found.source, 0.0
    if answer.values is not None and answer.objective is not None:
        other = model.invert(answer.values)
        if memory_excess(problem, other) is None:  # else amounts rounded down broke the limit
            cost = problem.evaluate(other)
            rounding = max(0.0, cost - answer.objective * model.unit)
            if cost < _cost(found):
                timetable, source = other, solver
    result = _result(problem, timetable, source, bounds, perf_counter() - began, rounding)
    return replace(result, log=answer.log)


def _result(
    problem: MakespanProblem,
    timetable: Timetable | None,
    source: str,
    bounds: tuple[Bound, ...],
    seconds: float,
    rounding: float = 0.0,
) -> ScheduleResult:
    """The result with the checked cost of ``timetable`` and the best bound."""
    best = max(bounds, key=lambda bound: bound.seconds)
    if timetable is None:
        return ScheduleResult(
            timetable=None,
            cost=None,
            bound=best.seconds,
            proved_by=best.proved_by,
            bounds=bounds,
            gap=None,
            status=Status.INFEASIBLE,
            source=source,
            seconds=seconds,
        )
    cost = problem.evaluate(timetable)
    if best.seconds > cost * (1 + RELATIVE_TOLERANCE):
        raise InvalidPlan(f"the schedule takes {cost}, below the bound {best}")
    bound = min(best.seconds, cost)  # sums of the same numbers in different orders
    is_tight = cost - bound <= rounding + RELATIVE_TOLERANCE * cost
    return ScheduleResult(
        timetable=timetable,
        cost=cost,
        bound=bound,
        proved_by=best.proved_by,
        bounds=bounds,
        gap=(cost - bound) / cost if cost > 0 else 0.0,
        status=Status.OPTIMAL if is_tight else Status.FEASIBLE,
        source=source,
        seconds=seconds,
        rounding=rounding,
    )


def _cost(found: ScheduleResult) -> float:
    assert found.cost is not None
    return found.cost


def _step(found: ScheduleResult) -> Progress:
    return Progress(found.seconds, found.cost, found.bound)
