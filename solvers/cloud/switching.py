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
    overhead_seconds,
)
from stagewright.formulations.forms.answers import Status, StopToken, is_stopped, settled
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.workloads.prices import HOUR, PriceSeries
from stagewright.solvers.cloud.switching_plans import SAME_DOLLARS, best_price, exact_work
from stagewright.solvers.cloud.switching_program import (
    SAME_MOMENT,
    TimeGrid,
    offer_path,
    places,
    price_rows,
)


def solve_rolling(problem: SwitchingProblem, stop: StopToken | None = None) -> Plan | None:
    """The plan that results from replanning at every price change, with constant price forecasts.

    It meets the deadline if any plan can, as rates are known; None if no plan can, or ``stop`` was
    set first.
    """
    kept = undominated(problem)  # the other offers are never cheaper
    rest = only(problem, kept)
    times, prices = price_rows(rest)
    past: Plan = ()
    while not is_stopped(stop):
        plan = solve_switching(_forecast(rest)).plan
        if plan is None:
            return None
        change = _next_change(times, prices, rest.start_seconds, {stay.offer for stay in plan})
        place = _position(rest, plan, change)
        if place is None:
            return renamed(_joined(past, plan), kept)
        number, now = place
        done = (*plan[:number], replace(plan[number], end_seconds=now))
        providers = {rest.offers[stay.offer].instance.provider for stay in done}
        past = _joined(past, done)
        rest = replace(
            rest,
            work_hours=rest.work_hours - offer_path(rest, done).work,
            start_seconds=now,
            running=done[-1].offer,
            stocked=rest.stocked | providers,
        )
    return None


def _next_change(times: Floats, prices: Floats, now: float, used: set[int]) -> float:
    """The next time at which the price of a used offer changes, or another offer gets cheaper.

    Until then the plan stays optimal, as all other changes are price increases.
    """
    first = int(np.searchsorted(times, now, side="right"))
    change = np.diff(prices[:, max(first - 1, 0) :], axis=1)
    matters = change < 0
    matters[sorted(used)] |= change[sorted(used)] > 0
    after = np.flatnonzero(matters.any(axis=0))
    return float(times[first + after[0]]) if len(after) else math.inf


def _forecast(problem: SwitchingProblem) -> SwitchingProblem:
    """The problem with all prices constant at their initial values."""
    begin, end = problem.start_seconds, problem.deadline_seconds
    offers = tuple(
        replace(
            offer, series=PriceSeries(offer.instance, (begin,), (offer.series.price(begin),), end)
        )
        for offer in problem.offers
    )
    return replace(problem, offers=offers)


def _position(problem: SwitchingProblem, plan: Plan, change: float) -> tuple[int, float] | None:
    """Index and start of the stay at ``change``, or of the next one; None if the plan ends."""
    for number, stay in enumerate(plan):
        is_last = number + 1 == len(plan)
        saving = 0.0 if is_last else problem.overheads.checkpoint_seconds
        ready = stay.begin_seconds + overhead_seconds(problem, plan, number) - saving
        if stay.end_seconds - saving > max(change, ready) + SAME_MOMENT:
            return number, max(change, ready)
    return None


def _joined(past: Plan, plan: Plan) -> Plan:
    """Append ``plan`` to the executed stays; its first stay continues the last one."""
    if not past:
        return plan
    return (*past[:-1], replace(plan[0], begin_seconds=past[-1].begin_seconds), *plan[1:])


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
