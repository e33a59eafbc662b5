"""Optimal placement and order by constraint programming, from the best that is known."""

from dataclasses import dataclass, replace
from time import perf_counter

from stagewright.formulations.forms.answers import Limits, Status, settled
from stagewright.formulations.operators.bounds import CP_SAT, shortage
from stagewright.formulations.operators.check import BOUND_ROUNDING
from stagewright.formulations.operators.plan import OperatorBound
from stagewright.formulations.operators.problem import OperatorProblem, Timetable
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.solvers.operators.bounds import bounds_of
from stagewright.solvers.operators.exact_model import Model
from stagewright.solvers.operators.search import (
    Tell,
    best_list_schedule,
    search,
    shortest,
    to_nobody,
)

MOST = 60  # operators
EVALUATIONS = 800_000  # of the search before


@dataclass(frozen=True, slots=True, eq=False)
class OperatorResult:
    """A checked timetable and all bounds; ``bound`` is the best of them, in seconds.

    ``timetable`` and ``cost`` are None if nothing within the memory was found; then ``reason`` says
    why if that is proved. ``source`` names the method that found the timetable.
    """

    timetable: Timetable | None
    cost: float | None
    bound: float
    bounds: tuple[OperatorBound, ...]
    status: Status
    source: str
    reason: str
    seconds: float

    @property
    def gap(self) -> float | None:
        """(cost - bound) / cost."""
        if self.cost is None:
            return None
        return (self.cost - self.bound) / self.cost if self.cost > self.bound else 0.0


def solve_exactly(
    problem: OperatorProblem, limits: Limits, tell: Tell = to_nobody
) -> OperatorResult:
    """The best timetable within ``limits``: list schedules, search, then CP-SAT.

    Of problems of more than ``MOST`` operators only the first two. ``tell`` is called with the
    seconds of the best so far.
    """
    began = perf_counter()
    bounds = bounds_of(problem)
    short = shortage(problem)
    if short is not None:
        return _result(None, bounds, Status.INFEASIBLE, "none", began, short.reason)
    lower = max(bound.seconds for bound in bounds)
    source, best = best_list_schedule(problem)
    found = search(problem, EVALUATIONS, limits, best, lower, tell)
    if found is not best:
        source, best = "search", found
    is_open = best is None or best.end > lower * (1 + RELATIVE_TOLERANCE)
    if len(problem.names) > MOST or not is_open:
        return _result(best, bounds, limits.status(found=best is not None), source, began)
    seconds = limits.left(perf_counter() - began)
    model = Model(problem, best, lower)
    answer = model.solve(replace(limits, seconds=seconds))
    if answer.status is Status.INFEASIBLE:
        if best is not None:
            raise InvalidPlan(f"{CP_SAT} finds no plan, {source} found one of {best.end} s")
        return _result(None, bounds, answer.status, "none", began, f"proved by {CP_SAT}")
    bounds = (*bounds, OperatorBound(max(0.0, answer.bound * model.unit), CP_SAT, "these splits"))
    if answer.values is not None:
        found = shortest(problem, [best, model.timetable(answer.values)])
        if found is not best:
            source, best = CP_SAT, found
    return _result(best, bounds, limits.status(found=best is not None), source, began)


def _result(
    timetable: Timetable | None,
    bounds: tuple[OperatorBound, ...],
    status: Status,
    source: str,
    began: float,
    reason: str = "",
) -> OperatorResult:
    """The result, optimal if cost and bound are equal; a bound above the cost is an error."""
    cost = None if timetable is None else timetable.end
    bound = max(one.seconds for one in bounds)
    if cost is not None:
        if bound > cost * (1 + BOUND_ROUNDING):
            raise InvalidPlan(f"the timetable takes {cost} s, below the bound of {bound} s")
        bound = min(bound, cost)
        status = settled(status, cost, bound)
    return OperatorResult(
        timetable=timetable,
        cost=cost,
        bound=bound,
        bounds=bounds,
        status=status,
        source=source,
        reason=reason,
        seconds=perf_counter() - began,
    )
