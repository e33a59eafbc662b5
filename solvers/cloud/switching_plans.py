"""Plans with exactly the required work, made from optimal plans at one price of work."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from stagewright.formulations.cloud.switching import (
    Plan,
    Stay,
    SwitchingProblem,
    is_enough,
    overhead_seconds,
)
from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.graphs.workloads.prices import HOUR
from stagewright.solvers.cloud.switching_program import (
    OfferPath,
    TimeGrid,
    offer_path,
    price_rows,
    relaxed,
)

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


_BISECTIONS = 60


def exact_work(problem: SwitchingProblem, found: PriceBound) -> Iterator[Plan]:
    """Plans with exactly the required work, made from the relaxed plans; and single stays."""
    for enough in reversed(found.enough):
        yield from _shortened(problem, enough.plan)
    for little in reversed(found.little):
        yield from _extended(problem, little.plan)
    yield from _single_stays(problem)
    for little, enough in itertools.product(reversed(found.little), reversed(found.enough)):
        for first, second in ((little, enough), (enough, little)):
            for plan in _spliced(problem, first.plan, second.plan):
                yield from _shortened(problem, plan)


def _single_stays(problem: SwitchingProblem) -> Iterator[Plan]:
    """For each offer the cheapest stay that does all the work, starting or ending at a change."""
    changes, prices = price_rows(problem)
    moments = np.append(changes, problem.deadline_seconds)
    for number, offer in enumerate(problem.offers):
        restoring = 0.0 if problem.running is not None else problem.overheads.restore_seconds
        duration = restoring + HOUR * problem.work_hours / offer.rate
        begins = np.concatenate([moments, moments - duration])
        if problem.running is not None:
            begins = moments[: 1 if number == problem.running else 0]
        latest = problem.deadline_seconds - duration
        begins = begins[(begins >= problem.start_seconds) & (begins <= latest)]
        spent = np.append(0.0, np.cumsum(prices[number] * np.diff(moments)))
        dollars = np.interp(begins + duration, moments, spent) - np.interp(begins, moments, spent)
        if len(begins):
            begin = float(begins[dollars.argmin()])
            plan = (Stay(number, begin, min(begin + duration, problem.deadline_seconds)),)
            yield from (plan,) if _is_whole(problem, plan) else ()


def _extended(problem: SwitchingProblem, plan: Plan) -> Iterator[Plan]:
    """The plan with one stay extended before or after until all the work is done."""
    missing = problem.work_hours - offer_path(problem, plan).work
    for number, stay in enumerate(plan):
        more = HOUR * missing / problem.offers[stay.offer].rate
        earlier = replace(stay, begin_seconds=stay.begin_seconds - more)
        later = replace(stay, end_seconds=stay.end_seconds + more)
        before = plan[number - 1].end_seconds if number else problem.start_seconds
        rest = plan[number + 1 :]
        after = rest[0].begin_seconds if rest else problem.deadline_seconds
        for longer in (earlier, later):
            made = (*plan[:number], longer, *rest)
            if before <= longer.begin_seconds and longer.end_seconds <= after:
                yield from (made,) if _is_whole(problem, made) else ()


def _spliced(problem: SwitchingProblem, first: Plan, second: Plan) -> Iterator[Plan]:
    """``first`` until some time and ``second`` from then on, such that the work is done.

    The time is a change, or between two changes such that the work is exact.
    """
    moments = _splice_moments(problem, first, second)
    done = [_spliced_work(problem, first, second, at) for at in moments]
    for at, work in zip(moments, done, strict=True):
        if work >= problem.work_hours:
            yield _splice(problem, first, second, at)
    for i, (before, after) in enumerate(itertools.pairwise(done)):
        if (before >= problem.work_hours) == (after >= problem.work_hours):
            continue
        short, just = moments[i : i + 2] if before < after else reversed(moments[i : i + 2])
        for _ in range(_BISECTIONS):
            middle = (short + just) / 2
            if _spliced_work(problem, first, second, middle) >= problem.work_hours:
                just = middle
            else:
                short = middle
        yield _splice(problem, first, second, just)


def _splice_moments(problem: SwitchingProblem, first: Plan, second: Plan) -> list[float]:
    """Sorted ends of stays and price changes of the offers in either plan."""
    begin, end = problem.start_seconds, problem.deadline_seconds
    both = (*first, *second)
    moments = {at for stay in both for at in (stay.begin_seconds, stay.end_seconds)}
    for number in {stay.offer for stay in both}:
        moments |= {at for at in problem.offers[number].series.seconds if begin < at < end}
    return sorted({begin, *moments, end})


def _spliced_work(problem: SwitchingProblem, first: Plan, second: Plan, at: float) -> float:
    plan = _splice(problem, first, second, at)
    work = 0.0
    for number, stay in enumerate(plan):
        duration = stay.end_seconds - stay.begin_seconds
        idle = overhead_seconds(problem, plan, number)
        work += problem.offers[stay.offer].rate * (duration - idle) / HOUR
    return work


def _splice(problem: SwitchingProblem, first: Plan, second: Plan, at: float) -> Plan:
    """``first`` until ``at``, then ``second``, without stays shorter than their overheads."""
    head = [
        replace(stay, end_seconds=min(stay.end_seconds, at))
        for stay in first
        if stay.begin_seconds < at
    ]
    tail = [
        replace(stay, begin_seconds=max(stay.begin_seconds, at))
        for stay in second
        if stay.end_seconds > at
    ]
    meet = bool(head and tail) and head[-1].end_seconds == tail[0].begin_seconds
    if meet and head[-1].offer == tail[0].offer:
        joined = replace(head[-1], end_seconds=tail[0].end_seconds)
        return _without_idle(problem, (*head[:-1], joined, *tail[1:]))
    return _without_idle(problem, (*head, *tail))


def _without_idle(problem: SwitchingProblem, plan: Plan) -> Plan:
    """Remove stays that do no work, except the first stay of a running job."""
    number = len(plan) - 1
    while number >= 0:
        stay = plan[number]
        idle = overhead_seconds(problem, plan, number)
        bound_to_stay = number == 0 and problem.running is not None
        if stay.end_seconds - stay.begin_seconds <= idle and not bound_to_stay:
            plan = (*plan[:number], *plan[number + 1 :])
            number = len(plan)  # the previous stay may be the last one now
        number -= 1
    return plan


def _shortened(problem: SwitchingProblem, plan: Plan) -> list[Plan]:
    """Plans without excess work: ended early, or with one stay cut at its start or end."""
    done = _ended(problem, plan)
    if done is None:
        return []
    found = [done]
    excess = offer_path(problem, plan).work - problem.work_hours
    for number, stay in enumerate(plan):
        cut = HOUR * excess / problem.offers[stay.offer].rate
        duration = stay.end_seconds - stay.begin_seconds
        if cut <= 0 or cut >= duration - overhead_seconds(problem, plan, number):
            continue
        later = replace(stay, begin_seconds=stay.begin_seconds + cut)
        sooner = replace(stay, end_seconds=stay.end_seconds - cut)
        for shorter in (
            (sooner,) if number == 0 and problem.running is not None else (later, sooner)
        ):
            found.append((*plan[:number], shorter, *plan[number + 1 :]))
    return [one for one in found if _is_whole(problem, one)]


def _ended(problem: SwitchingProblem, plan: Plan) -> Plan | None:
    work = 0.0
    for number, stay in enumerate(plan):
        upto = plan[: number + 1]
        rate = problem.offers[stay.offer].rate / HOUR
        duration = stay.end_seconds - stay.begin_seconds
        useful = rate * (duration - overhead_seconds(problem, upto, number))
        if is_enough(problem, work + useful):
            spare = max(0.0, (work + useful - problem.work_hours) / rate)
            end = max(stay.begin_seconds, stay.end_seconds - spare)
            return (*plan[:number], replace(stay, end_seconds=end))
        work += rate * (duration - overhead_seconds(problem, plan, number))
    return None


def _is_whole(problem: SwitchingProblem, plan: Plan) -> bool:
    """Whether the plan does the work from the initial state, with stays longer than overheads."""
    first = (plan[0].offer, plan[0].begin_seconds)
    if problem.running is not None and first != (problem.running, problem.start_seconds):
        return False
    return is_enough(problem, offer_path(problem, plan).work) and all(
        stay.end_seconds - stay.begin_seconds >= overhead_seconds(problem, plan, number)
        for number, stay in enumerate(plan)
    )
