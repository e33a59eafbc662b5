"""The cheapest plan of stays on cloud instances, with a proved bound.

The work requirement is relaxed with a price of lambda dollars per hour of work (Lagrange). What is
left is a dynamic program over time: a stay's cost is linear in when it begins and ends, with kinks
where a price changes, so some best plan leaves and takes up instances only when a price changes or
an overhead before that (``switching_times``); ``switching_program`` is exact on those times. Its
value plus lambda times the work bounds every plan from below, and ``switching_bound`` finds the
lambda of the best bound. There, a best plan that does too little work and one that does enough are
both optimal: following one until some moment and then the other does exactly the work. Without
overheads that costs no more than the bound, so the answer is optimal; with them it costs the moves
at the seam too, and the gap, which is reported, is small where a move is cheap beside the job.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from stagewright.formulations.cloud.switching import (
    Outcome,
    Plan,
    Stay,
    SwitchingProblem,
    evaluate,
)
from stagewright.formulations.forms.answers import Status
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.workloads.prices import HOUR
from stagewright.solvers.cloud.switching_bound import SAME_DOLLARS, best_price
from stagewright.solvers.cloud.switching_plans import exact_work
from stagewright.solvers.cloud.switching_times import SAME_MOMENT, TimeGrid, places, price_rows

PROVED_BY = "Lagrangian relaxation of the work, exact dynamic program over price changes"
OPTIMAL_GAP = 1e-7


@dataclass(frozen=True, slots=True)
class SwitchingResult:
    """A plan and its bound; plan and outcome are None if there is no plan.

    ``bound`` is a lower bound in dollars on all plans, ``work_price`` the lambda that gives it in
    dollars per hour of work.
    """

    status: Status
    plan: Plan | None
    outcome: Outcome | None
    bound: float
    proved_by: str
    work_price: float
    seconds: float
    reason: str | None = None

    @property
    def gap(self) -> float | None:
        """(cost - bound) / cost, None without a plan."""
        if self.outcome is None:
            return None
        if self.outcome.dollars <= self.bound:
            return 0.0
        return (self.outcome.dollars - self.bound) / self.outcome.dollars


def solve_switching(problem: SwitchingProblem, hints: Iterable[Plan] = ()) -> SwitchingResult:
    """The cheapest plan; it costs no more than any of the valid plans ``hints``."""
    began = perf_counter()
    kept = undominated(problem)
    smaller = only(problem, kept)
    grid = TimeGrid.of(smaller)
    found = best_price(smaller, grid)
    if isinstance(found, float):
        return _infeasible(problem, found, perf_counter() - began)
    made = (renamed(plan, kept) for plan in exact_work(smaller, found))
    best, _ = _cheapest(problem, itertools.chain(hints, made), found.bound)
    best = _tidied(problem, best)
    outcome = evaluate(problem, best)
    result = SwitchingResult(
        Status.FEASIBLE,
        best,
        outcome,
        min(found.bound, outcome.dollars),  # above it by rounding alone
        PROVED_BY,
        found.work_price,
        perf_counter() - began,
    )
    is_proved = result.gap is not None and result.gap <= OPTIMAL_GAP
    return replace(result, status=Status.OPTIMAL) if is_proved else result


def _cheapest(
    problem: SwitchingProblem, plans: Iterable[Plan], bound: float
) -> tuple[Plan, Outcome]:
    """The cheapest plan, in a tie the one that ends first."""
    best: tuple[Plan, Outcome] | None = None
    for plan in plans:
        outcome = evaluate(problem, plan)
        if best is None or _rank(outcome) < _rank(best[1]):
            best = plan, outcome
        if outcome.dollars <= bound * (1 + SAME_DOLLARS):
            break
    assert best is not None  # a plan that does the most work does enough
    return best


def _tidied(problem: SwitchingProblem, plan: Plan) -> Plan:
    """The plan without stays of no time, and waits between two stays on one offer, for nothing."""
    for simpler in _simpler(problem, plan):
        if _is_no_worse(problem, simpler, plan):
            return _tidied(problem, simpler)
    return plan


def _simpler(problem: SwitchingProblem, plan: Plan) -> Iterator[Plan]:
    """The plan with one stay less: left out, or joined to the next by moving one of the two."""
    for number, stay in enumerate(plan):
        if stay.end_seconds - stay.begin_seconds <= SAME_MOMENT:
            yield (*plan[:number], *plan[number + 1 :])
    for number, (stay, following) in enumerate(itertools.pairwise(plan)):
        if stay.offer != following.offer:
            continue
        gap = following.begin_seconds - stay.end_seconds
        gap += problem.overheads.checkpoint_seconds + problem.overheads.restore_seconds
        for begin, end in (
            (stay.begin_seconds, following.end_seconds - gap),
            (stay.begin_seconds + gap, following.end_seconds),
        ):
            yield (*plan[:number], Stay(stay.offer, begin, end), *plan[number + 2 :])


def _is_no_worse(problem: SwitchingProblem, plan: Plan, other: Plan) -> bool:
    try:
        dollars = evaluate(problem, plan).dollars
    except InvalidPlan:
        return False
    return dollars <= evaluate(problem, other).dollars * (1 + SAME_DOLLARS)


def _rank(outcome: Outcome) -> tuple[float, float, int]:
    return round(outcome.dollars, 9), outcome.seconds, outcome.switches


def _infeasible(problem: SwitchingProblem, most: float, seconds: float) -> SwitchingResult:
    hours = (problem.deadline_seconds - problem.start_seconds) / HOUR
    reason = (
        f"at most {most:.6g} of {problem.work_hours:.6g} hours of work can be done in the "
        f"{hours:.6g} h until the deadline"
    )
    return SwitchingResult(
        Status.INFEASIBLE, None, None, math.inf, PROVED_BY, math.inf, seconds, reason
    )


def undominated(problem: SwitchingProblem) -> list[int]:
    """Positions of the offers that are enough for some optimal plan.

    An offer is left out if another in the same region is never dearer and never slower: a plan
    with the one for the other is as cheap. Where leaving a region costs nothing, all are one.
    """
    _, prices = price_rows(problem)
    rates = np.array([offer.rate for offer in problem.offers])
    place = np.array(places(problem))
    kept: list[int] = []
    # Cheapest first, so that of two equal offers the first is kept.
    for i in sorted(range(len(rates)), key=lambda i: (prices[i].sum(), -rates[i], i)):
        beaten = any(
            place[j] == place[i] and rates[j] >= rates[i] and (prices[j] <= prices[i]).all()
            for j in kept
        )
        if not beaten or i == problem.running:
            kept.append(i)
    return sorted(kept)


def only(problem: SwitchingProblem, kept: list[int]) -> SwitchingProblem:
    """The problem with some of its offers; :func:`renamed` takes its plans back."""
    return replace(
        problem,
        offers=tuple(problem.offers[i] for i in kept),
        running=None if problem.running is None else kept.index(problem.running),
    )


def renamed(plan: Plan, kept: list[int]) -> Plan:
    """The plan with the positions of the offers in the original problem."""
    return tuple(replace(stay, offer=kept[stay.offer]) for stay in plan)
