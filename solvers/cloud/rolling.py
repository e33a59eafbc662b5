"""Rolling horizon: replan at every price change with the prices known so far."""

import math
from dataclasses import replace

import numpy as np

from stagewright.formulations.cloud.switching import (
    Plan,
    SwitchingProblem,
    overhead_seconds,
)
from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.workloads.prices import PriceSeries
from stagewright.solvers.cloud.switching import only, renamed, solve_switching, undominated
from stagewright.solvers.cloud.switching_program import offer_path
from stagewright.solvers.cloud.switching_times import SAME_MOMENT, price_rows


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
            offer,
            series=PriceSeries(offer.instance, (begin,), (offer.series.price(begin),), end),
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
