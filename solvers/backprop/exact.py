"""Solve the common problem: list schedules, static bounds, then CP-SAT."""

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from stagewright.formulations.backprop.models import BackpropByIntervals
from stagewright.formulations.backprop.of_stages import in_turns, renumbered, window_bounds
from stagewright.formulations.backprop.orders import (
    conventional,
    critical_path,
    fast_forward,
    reverse_first_k,
)
from stagewright.formulations.backprop.problem import BackpropProblem, WindowTimes
from stagewright.formulations.forms.answers import Limits, Status, settled
from stagewright.formulations.pipelines.makespan_models import CP_SAT
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.solvers.backends.backend import scheduler, solve_intervals
from stagewright.solvers.backprop.list_scheduling import improve, insert, list_schedule
from stagewright.solvers.backprop.tabu import tabu_search

_SEARCHED = 800_000  # times of operations that tabu search computes
_PERTURBED = 10_000  # operations in perturbed schedules, all together
NOISE = (0.02, 0.05, 0.1, 0.2)  # of the window
_IMPROVED = 3  # of the shortest list schedules
SHARES = 6  # values of k that are tried, evenly over the layers


@dataclass(frozen=True, slots=True, eq=False)
class BackpropResult:
    """A checked timetable with its bound; seconds of a window.

    ``bound`` holds for every order of operations and every split of transfers that the problem
    allows; ``proved_by`` names its argument. ``timetable``, ``cost`` and ``gap`` are None if
    nothing within the memory was found. ``source`` names the method that found the timetable.
    """

    timetable: WindowTimes | None
    cost: float | None
    bound: float
    proved_by: str
    gap: float | None
    status: Status
    source: str
    seconds: float


def best_list_schedule(problem: BackpropProblem) -> tuple[str, WindowTimes | None]:
    """The shortest list schedule that fits in memory, and its rule; None if none fits."""
    by_rule = {}
    for name, ranks in _rules(problem):
        by_rule[name] = list_schedule(problem, ranks)
        by_rule[f"{name}, inserted"] = insert(problem, ranks)
    shortest = sorted(by_rule, key=lambda name: by_rule[name].end)
    improved = {
        f"{name}, improved": improve(problem, by_rule[name]) for name in shortest[:_IMPROVED]
    }
    found = sorted((improved | by_rule).items(), key=lambda entry: entry[1].end)
    for name, one in found:
        if _is_valid(problem, one):
            return _searched(problem, name, _perturbed(problem, one))
    return "none", None


def _searched(problem: BackpropProblem, name: str, best: WindowTimes) -> tuple[str, WindowTimes]:
    """Search the orders from the best timetable, which is kept if no better timetable fits."""
    turns = in_turns(problem)
    start = best if turns is problem else renumbered(problem, best)
    least = max(bound for _, bound in window_bounds(turns)) * (1 + RELATIVE_TOLERANCE)
    found = improve(turns, tabu_search(turns, start, least, _SEARCHED))
    if found.end < best.end * (1 - RELATIVE_TOLERANCE) and _is_valid(problem, found):
        return f"{name}, tabu search", found
    return name, best


def _perturbed(problem: BackpropProblem, best: WindowTimes) -> WindowTimes:
    """Schedule by perturbed starts of the best timetable and improve; keep the best timetable."""
    rng = np.random.default_rng(0)
    least = max(bound for _, bound in window_bounds(problem)) * (1 + RELATIVE_TOLERANCE)
    for turn in range(_PERTURBED // max(1, len(problem.operations))):
        if best.end <= least:
            break
        noise = NOISE[turn // 2 % len(NOISE)] * best.end
        moved = best.starts + noise * rng.standard_normal(len(best.starts))
        ranks = np.empty(len(moved), dtype=np.int64)
        ranks[np.argsort(moved)] = np.arange(len(moved))
        schedule = insert if turn % 2 else list_schedule
        other = improve(problem, schedule(problem, ranks))
        if other.end < best.end and _is_valid(problem, other):
            best = other
    return best


def solve(
    problem: BackpropProblem,
    limits: Limits,
    known: tuple[str, WindowTimes | None] | None = None,
) -> BackpropResult:
    """The best timetable found within ``limits``, and a bound on all of them.

    Never worse than ``known``, a timetable and its source, by default :func:`best_list_schedule`.
    The search ends when the cost equals the bound.

    Raises
    ------
    InputError
        If transfers on preemptible links have no coarse common unit of time, unless list schedules
        reach the bound.
    """
    began = perf_counter()
    backend = scheduler(limits)
    turns = in_turns(problem)
    proved_by, bound = max(window_bounds(turns), key=lambda entry: entry[1])
    source, timetable = known or best_list_schedule(problem)
    found = _result(timetable, bound, proved_by, source, Status.FEASIBLE, began)
    if found.status is Status.OPTIMAL:
        return found
    horizon = float(problem.seconds.sum()) if timetable is None else timetable.end
    model = BackpropByIntervals(turns, horizon)
    hint = renumbered(problem, timetable) if timetable is not None and model.is_exact else None
    form = model.apply(bound, hint)
    answer = solve_intervals(form, limits)
    if answer.status is Status.INFEASIBLE and timetable is None:
        return _result(None, bound, proved_by, source, Status.INFEASIBLE, began)
    if answer.bound * model.unit > bound:
        proved_by, bound = CP_SAT, answer.bound * model.unit
    if answer.values is not None:
        other = _read(model, answer.values)
        if (timetable is None or other.end < timetable.end) and _is_valid(problem, other):
            source, timetable = backend.solver, other
    status = limits.status(found=timetable is not None)
    return _result(timetable, bound, proved_by, source, status, began)


def _rules(problem: BackpropProblem) -> Iterator[tuple[str, Ints]]:
    layers = max((one.layer for one in problem.operations if one.kind == "F"), default=1)
    yield "critical path", critical_path(problem)
    yield "conventional", conventional(problem)
    for k in sorted({round(layers * share / SHARES) for share in range(1, SHARES + 1)}):
        yield f"reverse first {k}", reverse_first_k(problem, k)
    yield "fast-forward", fast_forward(problem)
    yield "fast-forward, reversed", fast_forward(problem, layers)


def _read(model: BackpropByIntervals, values: Ints) -> WindowTimes:
    if model.is_exact:
        return model.invert(values)
    problem = model.ordered(values)
    return list_schedule(problem, np.arange(len(problem.operations)))


def _is_valid(problem: BackpropProblem, timetable: WindowTimes) -> bool:
    """Whether a timetable fits in memory; raises if any other rule is broken."""
    try:
        problem.evaluate(timetable)
    except InvalidPlan as error:
        if "in memory" in str(error):
            return False
        raise
    return True


def _result(
    timetable: WindowTimes | None,
    bound: float,
    proved_by: str,
    source: str,
    status: Status,
    began: float,
) -> BackpropResult:
    """The record; optimal if the cost is the bound."""
    cost = None if timetable is None else timetable.end
    if cost is not None:
        if bound > cost * (1 + RELATIVE_TOLERANCE):
            raise InvalidPlan(f"the timetable takes {cost}, below the bound {bound} ({proved_by})")
        bound = min(bound, cost)
        status = settled(status, cost, bound)
    gap = None if cost is None else (cost - bound) / cost if cost > 0 else 0.0
    seconds = perf_counter() - began
    return BackpropResult(timetable, cost, bound, proved_by, gap, status, source, seconds)
