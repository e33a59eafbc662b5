"""The cheapest plan of stays on cloud instances, with a proved bound.

The work requirement is relaxed with a price of lambda dollars per hour of work (Lagrange). The
relaxed problem is a dynamic program over time: the cost of a stay is piecewise linear in its start
and end, with breakpoints at price changes, so some optimal plan starts and ends stays only at a
price change or an overhead before one (``switching_times``); ``switching_program`` is exact on
these times. Its value plus lambda times the work is a lower bound on every plan, and
``switching_bound`` finds the lambda of the best bound. At that lambda, a plan that does too little
work and a plan that does enough are both optimal; following one until some time and then the other
does exactly the work. Without overheads this costs no more than the bound, so the answer is
optimal. With overheads it also costs the moves at that time; the gap, which is reported, is small
if a move is cheap compared with the job.
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
from stagewright.formulations.forms.answers import Status, StopToken, is_stopped, settled
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.workloads.prices import HOUR
from stagewright.solvers.cloud.switching_bound import SAME_DOLLARS, best_price
from stagewright.solvers.cloud.switching_plans import exact_work
from stagewright.solvers.cloud.switching_times import SAME_MOMENT, TimeGrid, places, price_rows

PROVED_BY = "Lagrangian relaxation of the work, exact dynamic program over price changes"
OPTIMAL_GAP = 1e-7


@dataclass(frozen=True, slots=True)
class SwitchingResult:
    """A plan with its bound; plan and outcome are None if and only if no plan exists.

    ``bound`` is a lower bound in dollars on all plans, ``work_price`` its lambda in dollars per
    hour of work.
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


def solve_switching(
    problem: SwitchingProblem, hints: Iterable[Plan] = (), stop: StopToken | None = None
) -> SwitchingResult:
    """The cheapest plan; never more expensive than a plan of ``hints``, which must be valid.

    Once ``stop`` is set, the plan and the bound are those of the best lambda so far.
    """
    began = perf_counter()
    kept = undominated(problem)
    smaller = only(problem, kept)
    grid = TimeGrid.of(smaller)
    found = best_price(smaller, grid, stop)
    if isinstance(found, float):
        return _infeasible(problem, found, perf_counter() - began)
    made = (renamed(plan, kept) for plan in exact_work(smaller, found))
    best, _ = _cheapest(problem, itertools.chain(hints, made), found.bound)
    best = _tidied(problem, best)
    outcome = evaluate(problem, best)
    ended = Status.INTERRUPTED if is_stopped(stop) else Status.FEASIBLE
    return SwitchingResult(
        settled(ended, outcome.dollars, found.bound, OPTIMAL_GAP),
        best,
        outcome,
        min(found.bound, outcome.dollars),  # the bound exceeds the cost only by rounding
        PROVED_BY,
        found.work_price,
        perf_counter() - began,
    )


def _cheapest(
    problem: SwitchingProblem, plans: Iterable[Plan], bound: float
) -> tuple[Plan, Outcome]:
    """The cheapest plan, ties broken by the earliest end; a plan at the bound ends the search."""
    best: tuple[Plan, Outcome] | None = None
    for plan in plans:
        outcome = evaluate(problem, plan)
        if best is None or _rank(outcome) < _rank(best[1]):
            best = plan, outcome
        if outcome.dollars <= bound * (1 + SAME_DOLLARS):
            break
    assert best is not None  # the plan with the most work does enough
    return best


def _tidied(problem: SwitchingProblem, plan: Plan) -> Plan:
    """Remove stays of zero duration and waits within an offer where that costs nothing."""
    for simpler in _simpler(problem, plan):
        if _is_no_worse(problem, simpler, plan):
            return _tidied(problem, simpler)
    return plan


def _simpler(problem: SwitchingProblem, plan: Plan) -> Iterator[Plan]:
    """Plans with one stay removed, or merged with the next one by moving one of the two."""
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
    """Indices of the offers that some optimal plan needs.

    An offer is left out if another one in the same region is never more expensive and never slower,
    as it can replace the offer in any plan. If leaving a region costs nothing, all regions are one.
    """
    _, prices = price_rows(problem)
    rates = np.array([offer.rate for offer in problem.offers])
    place = np.array(places(problem))
    kept: list[int] = []
    # Cheapest first, so that the first of two equal offers is kept.
    for i in sorted(range(len(rates)), key=lambda i: (prices[i].sum(), -rates[i], i)):
        beaten = any(
            place[j] == place[i] and rates[j] >= rates[i] and (prices[j] <= prices[i]).all()
            for j in kept
        )
        if not beaten or i == problem.running:
            kept.append(i)
    return sorted(kept)


def only(problem: SwitchingProblem, kept: list[int]) -> SwitchingProblem:
    """The problem restricted to some offers; :func:`renamed` converts its plans."""
    return replace(
        problem,
        offers=tuple(problem.offers[i] for i in kept),
        running=None if problem.running is None else kept.index(problem.running),
    )


def renamed(plan: Plan, kept: list[int]) -> Plan:
    """Convert a plan of :func:`only` to the offers of the original problem."""
    return tuple(replace(stay, offer=kept[stay.offer]) for stay in plan)
