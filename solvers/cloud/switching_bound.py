"""The price of work that gives the best bound on all plans."""

from dataclasses import dataclass, replace

from stagewright.formulations.cloud.switching import (
    SwitchingProblem,
    is_enough,
)
from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.solvers.cloud.switching_program import OfferPath, offer_path, relaxed
from stagewright.solvers.cloud.switching_times import TimeGrid

_MAX_ROUNDS = 200
SAME_DOLLARS = 1e-12  # relative
_SAME_WORK = 1e-12  # relative
KEPT = 2  # plans kept with too little work, and with enough


@dataclass(frozen=True, slots=True)
class PriceBound:
    """The best bound, its lambda, and the last plans with too little work and with enough."""

    bound: float
    work_price: float
    little: tuple[OfferPath, ...]
    enough: tuple[OfferPath, ...]


def best_price(
    problem: SwitchingProblem, grid: TimeGrid, stop: StopToken | None = None
) -> PriceBound | float:
    """The lambda of the best bound; or the most work that can be done, if that is not enough.

    The bound is concave in lambda: the minimum of the lines dollars + lambda * (work left) over all
    plans. The next lambda is at the intersection of the two lines that bracket the maximum; if no
    plan's line is below the intersection, it is the maximum. The value at every lambda is a bound,
    so ``stop`` only leaves a weaker one.
    """
    _, most = relaxed(problem, grid, 0.0, 1.0)
    if not is_enough(problem, most.work):
        return most.work
    bound, idle = relaxed(problem, grid, 1.0, 0.0)
    work_price = 0.0
    little, enough = [idle], [replace(most, dollars=offer_path(problem, most.plan).dollars)]
    for _ in range(_MAX_ROUNDS):
        low, high = little[-1], enough[-1]
        if is_stopped(stop) or high.work - low.work <= problem.work_hours * _SAME_WORK:
            break
        price = max(0.0, (high.dollars - low.dollars) / (high.work - low.work))
        value, path = relaxed(problem, grid, 1.0, price)
        if value + price * problem.work_hours > bound:
            bound, work_price = value + price * problem.work_hours, price
        if value >= low.dollars - price * low.work - SAME_DOLLARS * max(1.0, high.dollars):
            break
        (enough if path.work >= problem.work_hours else little).append(path)
    return PriceBound(bound, work_price, tuple(little[-KEPT:]), tuple(enough[-KEPT:]))
