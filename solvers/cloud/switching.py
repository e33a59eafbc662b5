"""The cheapest plan of stays on cloud instances, with a proved bound.

The work requirement is relaxed with a price of lambda dollars per hour of work (Lagrange). What is
left is a dynamic program over time: a stay's cost is linear in when it begins and ends, with kinks
where a price changes, so some best plan leaves and takes up instances only when a price changes or
an overhead before that (:class:`_Grid`); :func:`_backward` is exact on those times. Its value plus
lambda times the work bounds every plan from below, and :func:`_best_price` finds the lambda of the
best bound. There, a best plan that does too little work and one that does enough are both optimal:
following one until some moment and then the other does exactly the work. Without overheads that
costs no more than the bound, so the answer is optimal; with them it costs the moves at the seam
too, and the gap, which is reported, is small where a move is cheap beside the job.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from numba import njit

from stagewright.formulations.cloud.switching import (
    Outcome,
    Plan,
    Stay,
    SwitchingProblem,
    evaluate,
    is_enough,
    moving_dollars,
    overhead_seconds,
)
from stagewright.formulations.forms.answers import Status
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.workloads.prices import HOUR, PriceSeries

PROVED_BY = "Lagrangian relaxation of the work, exact dynamic program over price changes"
OPTIMAL_GAP = 1e-7
MAX_ROUNDS = 200
KEPT = 2  # plans on either side of the work from which a plan is made
BISECTIONS = 60
SAME_DOLLARS = 1e-12  # relative
SAME_WORK = 1e-12  # relative
SAME_MOMENT = 1e-6  # seconds; times of the order of 1e9 s are not told apart better

# Choices of the dynamic program besides the offers to move to.
STOP, STAY, WAIT = -1, -2, -3


@dataclass(frozen=True, slots=True)
class SwitchingResult:
    """A plan and what is proved of it; plan and outcome are None exactly if there is none.

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
    """The cheapest plan; it is never dearer than a plan of ``hints``, which must be valid."""
    began = perf_counter()
    kept = _undominated(problem)
    smaller = _only(problem, kept)
    grid = _Grid.of(smaller)
    found = _best_price(smaller, grid)
    if isinstance(found, float):
        return _infeasible(problem, found, perf_counter() - began)
    made = (_renamed(plan, kept) for plan in _exact_work(smaller, found))
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
    """The cheapest plan, of equals the one that ends first; none is looked at below the bound."""
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


# --- Preparation ---------------------------------------------------------------------------------


def _undominated(problem: SwitchingProblem) -> list[int]:
    """Positions of the offers that some best plan needs.

    An offer is left out if another in the same region is never dearer and never slower: a plan
    with the one for the other is as cheap. Where leaving a region costs nothing, all are one.
    """
    _, prices = _price_rows(problem)
    rates = np.array([offer.rate for offer in problem.offers])
    place = np.array(_places(problem))
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


def _only(problem: SwitchingProblem, kept: list[int]) -> SwitchingProblem:
    """The problem with some of its offers; :func:`_renamed` takes its plans back."""
    return replace(
        problem,
        offers=tuple(problem.offers[i] for i in kept),
        running=None if problem.running is None else kept.index(problem.running),
    )


def _renamed(plan: Plan, kept: list[int]) -> Plan:
    return tuple(replace(stay, offer=kept[stay.offer]) for stay in plan)


def _price_rows(problem: SwitchingProblem) -> tuple[Floats, Floats]:
    """Moments (E,), the start and all price changes, and dollars per hour of each offer (n, E)."""
    begin, end = problem.start_seconds, problem.deadline_seconds
    changes = {at for offer in problem.offers for at in offer.series.seconds if begin < at < end}
    times = np.array([begin, *sorted(changes)])
    prices = np.empty((len(problem.offers), len(times)))
    for row, offer in zip(prices, problem.offers, strict=True):
        at = np.searchsorted(np.array(offer.series.seconds), times, side="right") - 1
        row[:] = np.array(offer.series.dollars_per_hour)[at] * offer.instances
    return times, prices


def _places(problem: SwitchingProblem) -> list[int]:
    """A number per region (or one for all, where moving between regions costs nothing)."""
    keys = [(one.instance.provider, one.instance.region) for one in problem.offers]
    if not (problem.overheads.egress_dollars or problem.overheads.dataset_dollars):
        return [0] * len(keys)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def _providers(problem: SwitchingProblem) -> tuple[Ints, int]:
    """Each offer's provider as a bit, and the bits of those that have the dataset.

    No bits at all where the dataset costs nothing to copy.
    """
    names = list(dict.fromkeys(one.instance.provider for one in problem.offers))
    if not problem.overheads.dataset_dollars:
        return np.zeros(len(problem.offers), dtype=np.int64), 0
    bits = np.array([1 << names.index(one.instance.provider) for one in problem.offers])
    stocked = sum(1 << number for number, name in enumerate(names) if name in problem.stocked)
    if problem.running is not None:
        stocked |= int(bits[problem.running])
    return bits.astype(np.int64), stocked


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """Dollars and hours of work of each offer in a span of time from each moment, (K, n).

    ``after`` (K,) is the moment at which the span ends, K where that is past the deadline.
    """

    after: Ints
    dollars: Floats
    work: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """The moments of the dynamic program, seconds after the start, and what lies between them.

    From each moment on: ``stay`` until the next; ``save`` a checkpoint on the offer that is left
    (its end is rounded up to a moment, for one who waits then); ``move`` from the checkpoint's end
    to the first moment after the restore; ``begin`` the same for one who has been waiting;
    ``restore_dollars`` (K,) of the offer where a restore costs least.
    """

    times: Floats
    stay: _Span
    save: _Span
    move: _Span
    begin: _Span
    restore_dollars: Floats
    place: Ints
    provider: Ints
    stocked: int

    @classmethod
    def of(cls, problem: SwitchingProblem) -> "_Grid":
        """All moments at which a best plan of the relaxed problem may do something.

        A move that is begun at s touches prices at s, when the checkpoint is written and when the
        job runs again: it is best begun where one of these meets a price change.
        """
        saving = problem.overheads.checkpoint_seconds
        restoring = problem.overheads.restore_seconds
        changes, prices = _price_rows(problem)
        changes = np.append(changes, problem.deadline_seconds) - problem.start_seconds
        rates = np.array([offer.rate for offer in problem.offers]) / HOUR
        spent = np.zeros((len(prices), len(changes)))
        spent[:, 1:] = np.cumsum(prices * np.diff(changes), axis=1) / HOUR
        times = _moments(changes, {0.0, saving, restoring, saving + restoring})

        def dollars(begin: Floats, end: Floats) -> Floats:
            rows = [np.interp(end, changes, row) - np.interp(begin, changes, row) for row in spent]
            return np.array(rows).T.copy()

        def span(wait: float, idle: float) -> _Span:
            """What is paid from ``wait`` seconds on, until the first moment after ``idle`` more."""
            after = np.searchsorted(times, times + (wait + idle - SAME_MOMENT))
            begin = np.minimum(times + wait, times[-1])
            end = times[np.minimum(after, len(times) - 1)]
            work = np.outer(np.maximum(0.0, end - begin - idle), rates)
            return _Span(after, dollars(begin, end), work)

        following = np.append(times[1:], times[-1])
        saved = np.minimum(times + saving, times[-1])
        restored = dollars(times, times + restoring).min(axis=1)
        return cls(
            times,
            _Span(
                np.arange(1, len(times) + 1),
                dollars(times, following),
                np.outer(following - times, rates),
            ),
            _Span(
                span(saving, 0.0).after, dollars(times, saved), np.zeros((len(times), len(rates)))
            ),
            span(saving, restoring),
            span(0.0, restoring),
            np.where(times + restoring <= times[-1], restored, np.inf),
            np.array(_places(problem), dtype=np.int64),
            *_providers(problem),
        )


def _moments(changes: Floats, shifts: set[float]) -> Floats:
    """The changes and the times that are a shift before one; the last is the deadline."""
    every = np.unique(np.concatenate([changes - shift for shift in shifts]))
    every = every[(every >= 0) & (every < changes[-1] - SAME_MOMENT)]
    apart = np.concatenate([[True], np.diff(every) > SAME_MOMENT])
    return np.append(every[apart], changes[-1])


# --- The dynamic program -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Path:
    """A plan of the relaxed problem, what it costs and how much work it does."""

    plan: Plan
    dollars: float
    work: float


def _relaxed(
    problem: SwitchingProblem, grid: _Grid, weight: float, work_price: float
) -> tuple[float, _Path]:
    """The least of weight * dollars - work_price * work over all plans, and a plan of it.

    A plan has one stay at least; one that is nothing but the cheapest restore is given as ``()``.
    """
    stay, save, move, begin = (
        weight * span.dollars - work_price * span.work
        for span in (grid.stay, grid.save, grid.move, grid.begin)
    )
    on, off, on_choice, off_choice = _backward(
        stay,
        save,
        move,
        begin,
        np.where(np.isfinite(grid.restore_dollars), weight, 1.0) * grid.restore_dollars,
        grid.save.after,
        grid.move.after,
        grid.begin.after,
        grid.place,
        grid.provider,
        weight * problem.overheads.egress_dollars,
        weight * problem.overheads.dataset_dollars,
    )
    nowhere = off.shape[2] - 1
    running = problem.running
    value = off[0, grid.stocked, nowhere] if running is None else on[0, grid.stocked, running]
    plan = _read(problem, grid, on_choice, off_choice)
    work = _path(problem, plan).work
    return float(value), _Path(plan, (float(value) + work_price * work) / (weight or 1.0), work)


@njit(cache=True)
def _backward(
    stay: Floats,
    save: Floats,
    move: Floats,
    begin: Floats,
    restore: Floats,
    after_save: Ints,
    after_move: Ints,
    after_begin: Ints,
    place: Ints,
    provider: Ints,
    egress: float,
    dataset: float,
) -> tuple[Floats, Floats, Ints, Ints]:
    """Values and choices of being on an offer, and of waiting in a place, from each moment on.

    Shapes: ``on`` (K, masks, n), ``off`` (K, masks, places + 1); a mask is the set of providers
    that have the dataset, the last place is that of a job that has not begun, and has to.
    """
    moments, offers = stay.shape
    places = place.max() + 1
    masks = 1
    while masks <= provider.max():
        masks *= 2
    on, on_choice = np.zeros((moments, masks, offers)), np.full((moments, masks, offers), STOP)
    off = np.zeros((moments, masks, places + 1))
    off_choice = np.full((moments, masks, places + 1), STOP)
    off[:, :, places] = np.inf
    value, target = np.empty(places + 1), np.empty(places + 1, dtype=np.int64)
    for k in range(moments - 2, -1, -1):
        # Moves that take no time lead to this moment: first what does not move, for them to use.
        for mask in range(masks):
            off[k, mask, places] = restore[k]
            _remain(on, on_choice, off, off_choice, stay, k, mask)
        for mask in range(masks):
            if after_move[k] < moments:
                _targets(move[k], on[after_move[k]], mask, place, provider, dataset, value, target)
                _leave(on[k, mask], on_choice[k, mask], save[k], place, egress, value, target)
                _pause(on[k, mask], on_choice[k, mask], save[k], place, off[after_save[k], mask])
            if after_begin[k] < moments:
                onto = on[after_begin[k]]
                _targets(begin[k], onto, mask, place, provider, dataset, value, target)
                _begin(off[k, mask], off_choice[k, mask], egress, value, target)
    return on, off, on_choice, off_choice


@njit(cache=True)
def _remain(
    on: Floats, on_choice: Ints, off: Floats, off_choice: Ints, stay: Floats, k: int, mask: int
) -> None:
    """Stay, or wait on, until the next moment, where that is better than to stop."""
    for i in range(on.shape[2]):
        if stay[k, i] + on[k + 1, mask, i] < on[k, mask, i]:
            on[k, mask, i], on_choice[k, mask, i] = stay[k, i] + on[k + 1, mask, i], STAY
    for p in range(off.shape[2]):
        if off[k + 1, mask, p] < off[k, mask, p]:
            off[k, mask, p], off_choice[k, mask, p] = off[k + 1, mask, p], WAIT


@njit(cache=True)
def _targets(
    arriving: Floats,
    on: Floats,
    mask: int,
    place: Ints,
    provider: Ints,
    dataset: float,
    value: Floats,
    target: Ints,
) -> None:
    """The best offer to move to in each place, and in the last entry of all, with its value."""
    value[:] = np.inf
    last = len(value) - 1
    for j in range(len(place)):
        bit = provider[j]
        found = arriving[j] + on[mask | bit, j]
        if mask != 0 and mask & bit != bit:
            found += dataset
        if found < value[place[j]]:
            value[place[j]], target[place[j]] = found, j
        if found < value[last]:
            value[last], target[last] = found, j


@njit(cache=True)
def _leave(
    on: Floats,
    choice: Ints,
    save: Floats,
    place: Ints,
    egress: float,
    value: Floats,
    target: Ints,
) -> None:
    """Write the checkpoint and move, to the same place or another, where that is better."""
    last = len(value) - 1
    for i in range(len(on)):
        p = place[i]
        if save[i] + value[p] < on[i]:
            on[i], choice[i] = save[i] + value[p], target[p]
        if save[i] + egress + value[last] < on[i]:
            on[i], choice[i] = save[i] + egress + value[last], target[last]


@njit(cache=True)
def _pause(on: Floats, choice: Ints, save: Floats, place: Ints, off: Floats) -> None:
    """Write the checkpoint and wait, where that is better."""
    for i in range(len(on)):
        if save[i] + off[place[i]] < on[i]:
            on[i], choice[i] = save[i] + off[place[i]], WAIT


@njit(cache=True)
def _begin(off: Floats, choice: Ints, egress: float, value: Floats, target: Ints) -> None:
    """Take up an offer, where that is better; a job that has not begun leaves no place."""
    last = len(value) - 1
    for p in range(len(off)):
        if value[p] < off[p]:
            off[p], choice[p] = value[p], target[p]
        leaving = egress if p < last else 0.0
        if leaving + value[last] < off[p]:
            off[p], choice[p] = leaving + value[last], target[last]


def _read(problem: SwitchingProblem, grid: _Grid, on_choice: Ints, off_choice: Ints) -> Plan:
    """The plan that the choices make, from the start."""
    start, saving = problem.start_seconds, problem.overheads.checkpoint_seconds
    here, mask, k = problem.running, grid.stocked, 0
    begun = 0.0  # when the stay began, seconds after the start
    place = off_choice.shape[2] - 1
    stays = []
    while True:
        now = grid.times[k]
        choice = int(off_choice[k, mask, place] if here is None else on_choice[k, mask, here])
        if choice in (STAY, WAIT) and (here is None) == (choice == WAIT):
            k += 1
            continue
        if here is not None:
            end = now if choice == STOP else now + saving
            stays.append(Stay(here, float(start + begun), float(start + end)))
            place = int(grid.place[here])
        if choice == STOP:
            return tuple(stays)
        if choice == WAIT:
            here, k = None, int(grid.save.after[k])
            continue
        begun = now if here is None else now + saving
        k = int((grid.begin if here is None else grid.move).after[k])
        here, mask = choice, mask | int(grid.provider[choice])


def _path(problem: SwitchingProblem, plan: Plan) -> _Path:
    """Dollars and work of a plan that may do too little or too much."""
    dollars = moving_dollars(problem, plan)
    work = 0.0
    for number, stay in enumerate(plan):
        offer = problem.offers[stay.offer]
        idle = overhead_seconds(problem, plan, number)
        dollars += offer.dollars(stay.begin_seconds, stay.end_seconds)
        work += offer.rate * (stay.end_seconds - stay.begin_seconds - idle) / HOUR
    return _Path(plan, dollars, work)


# --- The price of work ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Relaxation:
    """The best bound, its lambda, and the plans met: those that do too little, and enough."""

    bound: float
    work_price: float
    little: tuple[_Path, ...]
    enough: tuple[_Path, ...]


def _best_price(problem: SwitchingProblem, grid: _Grid) -> _Relaxation | float:
    """The lambda of the best bound; or the most work that can be done, where that is too little.

    The bound is concave in lambda, the least of the lines dollars + lambda * (work left) of all
    plans. The next lambda is where the two lines cross that bracket the maximum; when no plan's
    line is below the crossing, that is the maximum.
    """
    _, most = _relaxed(problem, grid, 0.0, 1.0)
    if not is_enough(problem, most.work):
        return most.work
    bound, idle = _relaxed(problem, grid, 1.0, 0.0)
    work_price = 0.0
    little, enough = [idle], [replace(most, dollars=_path(problem, most.plan).dollars)]
    for _ in range(MAX_ROUNDS):
        low, high = little[-1], enough[-1]
        if high.work - low.work <= problem.work_hours * SAME_WORK:
            break
        price = max(0.0, (high.dollars - low.dollars) / (high.work - low.work))
        value, path = _relaxed(problem, grid, 1.0, price)
        if value + price * problem.work_hours > bound:
            bound, work_price = value + price * problem.work_hours, price
        if value >= low.dollars - price * low.work - SAME_DOLLARS * max(1.0, high.dollars):
            break
        (enough if path.work >= problem.work_hours else little).append(path)
    return _Relaxation(bound, work_price, tuple(little[-KEPT:]), tuple(enough[-KEPT:]))


# --- From two plans to one -----------------------------------------------------------------------


def _exact_work(problem: SwitchingProblem, found: _Relaxation) -> Iterator[Plan]:
    """Plans that do the work and no more, made of those of the relaxation; and single stays."""
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
    """For each offer the cheapest stay that does all work, with its begin or end at a change."""
    changes, prices = _price_rows(problem)
    moments = np.append(changes, problem.deadline_seconds)
    for number, offer in enumerate(problem.offers):
        restoring = 0.0 if problem.running is not None else problem.overheads.restore_seconds
        lasting = restoring + HOUR * problem.work_hours / offer.rate
        begins = np.concatenate([moments, moments - lasting])
        if problem.running is not None:
            begins = moments[: 1 if number == problem.running else 0]
        latest = problem.deadline_seconds - lasting
        begins = begins[(begins >= problem.start_seconds) & (begins <= latest)]
        spent = np.append(0.0, np.cumsum(prices[number] * np.diff(moments)))
        dollars = np.interp(begins + lasting, moments, spent) - np.interp(begins, moments, spent)
        if len(begins):
            begin = float(begins[dollars.argmin()])
            plan = (Stay(number, begin, min(begin + lasting, problem.deadline_seconds)),)
            yield from (plan,) if _is_whole(problem, plan) else ()


def _extended(problem: SwitchingProblem, plan: Plan) -> Iterator[Plan]:
    """The plan with one stay made longer, into the time before or after it, until all is done."""
    missing = problem.work_hours - _path(problem, plan).work
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
    """``first`` until some moment and ``second`` from then on, so that the work is done.

    The moment is one of a change, or between two that do too little and enough: then just enough.
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
        for _ in range(BISECTIONS):
            middle = (short + just) / 2
            if _spliced_work(problem, first, second, middle) >= problem.work_hours:
                just = middle
            else:
                short = middle
        yield _splice(problem, first, second, just)


def _splice_moments(problem: SwitchingProblem, first: Plan, second: Plan) -> list[float]:
    """Ends of stays, and price changes of the offers in either plan, in order."""
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
        lasting = stay.end_seconds - stay.begin_seconds
        idle = overhead_seconds(problem, plan, number)
        work += problem.offers[stay.offer].rate * (lasting - idle) / HOUR
    return work


def _splice(problem: SwitchingProblem, first: Plan, second: Plan, at: float) -> Plan:
    """``first`` until ``at``, then ``second``; stays too short for their overheads are left out."""
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
    """The plan without stays that do no work; a running job's first stay is kept."""
    number = len(plan) - 1
    while number >= 0:
        stay = plan[number]
        idle = overhead_seconds(problem, plan, number)
        bound_to_stay = number == 0 and problem.running is not None
        if stay.end_seconds - stay.begin_seconds <= idle and not bound_to_stay:
            plan = (*plan[:number], *plan[number + 1 :])
            number = len(plan)  # the stay before it may be the last now
        number -= 1
    return plan


def _shortened(problem: SwitchingProblem, plan: Plan) -> list[Plan]:
    """The plan ended when the work is done; or with the excess cut from one stay's begin or end."""
    done = _ended(problem, plan)
    if done is None:
        return []
    found = [done]
    excess = _path(problem, plan).work - problem.work_hours
    for number, stay in enumerate(plan):
        cut = HOUR * excess / problem.offers[stay.offer].rate
        lasting = stay.end_seconds - stay.begin_seconds
        if cut <= 0 or cut >= lasting - overhead_seconds(problem, plan, number):
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
        lasting = stay.end_seconds - stay.begin_seconds
        useful = rate * (lasting - overhead_seconds(problem, upto, number))
        if is_enough(problem, work + useful):
            spare = max(0.0, (work + useful - problem.work_hours) / rate)
            end = max(stay.begin_seconds, stay.end_seconds - spare)
            return (*plan[:number], replace(stay, end_seconds=end))
        work += rate * (lasting - overhead_seconds(problem, plan, number))
    return None


def _is_whole(problem: SwitchingProblem, plan: Plan) -> bool:
    """Whether the work is done, from where the job is, in stays long enough for their overheads."""
    first = (plan[0].offer, plan[0].begin_seconds)
    if problem.running is not None and first != (problem.running, problem.start_seconds):
        return False
    return is_enough(problem, _path(problem, plan).work) and all(
        stay.end_seconds - stay.begin_seconds >= overhead_seconds(problem, plan, number)
        for number, stay in enumerate(plan)
    )


# --- Without hindsight ---------------------------------------------------------------------------


def solve_rolling(problem: SwitchingProblem) -> Plan | None:
    """The plan of one who forecasts that prices stay as they are, and plans anew at every change.

    It meets the deadline whenever a plan can, as rates are known; None if no plan can.
    """
    kept = _undominated(problem)  # the others are at no time cheaper, now or later
    rest = _only(problem, kept)
    times, prices = _price_rows(rest)
    past: Plan = ()
    while True:
        plan = solve_switching(_forecast(rest)).plan
        if plan is None:
            return None
        change = _next_change(times, prices, rest.start_seconds, {stay.offer for stay in plan})
        place = _position(rest, plan, change)
        if place is None:
            return _renamed(_joined(past, plan), kept)
        number, now = place
        done = (*plan[:number], replace(plan[number], end_seconds=now))
        providers = {rest.offers[stay.offer].instance.provider for stay in done}
        past = _joined(past, done)
        rest = replace(
            rest,
            work_hours=rest.work_hours - _path(rest, done).work,
            start_seconds=now,
            running=done[-1].offer,
            stocked=rest.stocked | providers,
        )


def _next_change(times: Floats, prices: Floats, now: float, used: set[int]) -> float:
    """The next time at which an offer in use changes its price, or another becomes cheaper.

    Until then the plan stays the best: what else changes is dearer than it was.
    """
    first = int(np.searchsorted(times, now, side="right"))
    change = np.diff(prices[:, max(first - 1, 0) :], axis=1)
    matters = change < 0
    matters[sorted(used)] |= change[sorted(used)] > 0
    after = np.flatnonzero(matters.any(axis=0))
    return float(times[first + after[0]]) if len(after) else math.inf


def _forecast(problem: SwitchingProblem) -> SwitchingProblem:
    """The problem in which every price stays what it is at the start."""
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
    """The stay that runs at ``change``, or first after it, and from when; None if the plan ends."""
    for number, stay in enumerate(plan):
        is_last = number + 1 == len(plan)
        saving = 0.0 if is_last else problem.overheads.checkpoint_seconds
        ready = stay.begin_seconds + overhead_seconds(problem, plan, number) - saving
        if stay.end_seconds - saving > max(change, ready) + SAME_MOMENT:
            return number, max(change, ready)
    return None


def _joined(past: Plan, plan: Plan) -> Plan:
    """A plan after what was done, whose last stay its first one continues."""
    if not past:
        return plan
    return (*past[:-1], replace(plan[0], begin_seconds=past[-1].begin_seconds), *plan[1:])
