"""The exact dynamic program over price changes for a given price of work."""

from dataclasses import dataclass

import numpy as np
from numba import njit

from stagewright.formulations.cloud.switching import (
    Plan,
    Stay,
    SwitchingProblem,
    moving_dollars,
    overhead_seconds,
)
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.workloads.prices import HOUR

SAME_MOMENT = 1e-6  # seconds; the precision of floats of the order of 1e9 s


def price_rows(problem: SwitchingProblem) -> tuple[Floats, Floats]:
    """The start and all price changes, shape (E,), and dollars per hour of each offer, (n, E)."""
    begin, end = problem.start_seconds, problem.deadline_seconds
    changes = {at for offer in problem.offers for at in offer.series.seconds if begin < at < end}
    times = np.array([begin, *sorted(changes)])
    prices = np.empty((len(problem.offers), len(times)))
    for row, offer in zip(prices, problem.offers, strict=True):
        at = np.searchsorted(np.array(offer.series.seconds), times, side="right") - 1
        row[:] = np.array(offer.series.dollars_per_hour)[at] * offer.instances
    return times, prices


def places(problem: SwitchingProblem) -> list[int]:
    """The place of each offer: its region, or 0 if moving between regions costs nothing."""
    keys = [(one.instance.provider, one.instance.region) for one in problem.offers]
    if not (problem.overheads.egress_dollars or problem.overheads.dataset_dollars):
        return [0] * len(keys)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def _providers(problem: SwitchingProblem) -> tuple[Ints, int]:
    """Each offer's provider as a bit, and the bits of those that have the dataset.

    There are no bits if copying the dataset costs nothing.
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
class TimeSpan:
    """Dollars and hours of work of each offer in a time span from each moment, (K, n).

    ``after`` (K,) is the index of the moment at the end of the span, K if after the deadline.
    """

    after: Ints
    dollars: Floats
    work: Floats


@dataclass(frozen=True, slots=True, eq=False)
class TimeGrid:
    """The moments of the dynamic program, in seconds after the start, and the spans from them.

    From each moment on: ``stay`` until the next one; ``save`` a checkpoint on the current offer
    (for a wait, its end is rounded up to a moment); ``move`` from the end of the checkpoint to the
    first moment after the restore; ``begin`` likewise after a wait; ``restore_dollars`` (K,) of the
    offer with the cheapest restore.
    """

    times: Floats
    stay: TimeSpan
    save: TimeSpan
    move: TimeSpan
    begin: TimeSpan
    restore_dollars: Floats
    place: Ints
    provider: Ints
    stocked: int

    @classmethod
    def of(cls, problem: SwitchingProblem) -> "TimeGrid":
        """All moments at which an optimal plan of the relaxed problem may act.

        The cost of a move that starts at s depends on the prices at s, at the end of the checkpoint
        and at the end of the restore: some optimal s has one of these at a price change.
        """
        saving = problem.overheads.checkpoint_seconds
        restoring = problem.overheads.restore_seconds
        changes, prices = price_rows(problem)
        changes = np.append(changes, problem.deadline_seconds) - problem.start_seconds
        rates = np.array([offer.rate for offer in problem.offers]) / HOUR
        spent = np.zeros((len(prices), len(changes)))
        spent[:, 1:] = np.cumsum(prices * np.diff(changes), axis=1) / HOUR
        times = _moments(changes, {0.0, saving, restoring, saving + restoring})

        def dollars(begin: Floats, end: Floats) -> Floats:
            rows = [np.interp(end, changes, row) - np.interp(begin, changes, row) for row in spent]
            return np.array(rows).T.copy()

        def span(wait: float, idle: float) -> TimeSpan:
            """The span from ``wait`` seconds on until the first moment after ``idle`` more."""
            after = np.searchsorted(times, times + (wait + idle - SAME_MOMENT))
            begin = np.minimum(times + wait, times[-1])
            end = times[np.minimum(after, len(times) - 1)]
            work = np.outer(np.maximum(0.0, end - begin - idle), rates)
            return TimeSpan(after, dollars(begin, end), work)

        following = np.append(times[1:], times[-1])
        saved = np.minimum(times + saving, times[-1])
        restored = dollars(times, times + restoring).min(axis=1)
        return cls(
            times,
            TimeSpan(
                np.arange(1, len(times) + 1),
                dollars(times, following),
                np.outer(following - times, rates),
            ),
            TimeSpan(
                span(saving, 0.0).after, dollars(times, saved), np.zeros((len(times), len(rates)))
            ),
            span(saving, restoring),
            span(0.0, restoring),
            np.where(times + restoring <= times[-1], restored, np.inf),
            np.array(places(problem), dtype=np.int64),
            *_providers(problem),
        )


def _moments(changes: Floats, shifts: set[float]) -> Floats:
    """The changes and the times a shift before them; the last one is the deadline."""
    every = np.unique(np.concatenate([changes - shift for shift in shifts]))
    every = every[(every >= 0) & (every < changes[-1] - SAME_MOMENT)]
    apart = np.concatenate([[True], np.diff(every) > SAME_MOMENT])
    return np.append(every[apart], changes[-1])


# Choices of the dynamic program besides the offers to move to.
STOP, STAY, WAIT = -1, -2, -3


@dataclass(frozen=True, slots=True)
class OfferPath:
    """A plan of the relaxed problem, with its cost and work."""

    plan: Plan
    dollars: float
    work: float


def relaxed(
    problem: SwitchingProblem, grid: TimeGrid, weight: float, work_price: float
) -> tuple[float, OfferPath]:
    """The minimum of weight * dollars - work_price * work over all plans, and an optimal plan.

    A plan has at least one stay; the plan that consists of the cheapest restore only is ``()``.
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
    work = offer_path(problem, plan).work
    return float(value), OfferPath(plan, (float(value) + work_price * work) / (weight or 1.0), work)


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
    """Values and choices of running on an offer and of waiting in a place, from each moment on.

    Shapes: ``on`` (K, masks, n), ``off`` (K, masks, places + 1). A mask is the set of providers
    that have the dataset; the last place is that of a job that has not started.
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
        # Moves of zero duration end at this moment, so the choices without a move come first.
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
    """Stay, or keep waiting, until the next moment, if that is better than stopping."""
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
    """The best offer to move to in each place, and overall in the last entry, with its value."""
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
    on: Floats, choice: Ints, save: Floats, place: Ints, egress: float, value: Floats, target: Ints
) -> None:
    """Write the checkpoint and move, to the same place or another, if that is better."""
    last = len(value) - 1
    for i in range(len(on)):
        p = place[i]
        if save[i] + value[p] < on[i]:
            on[i], choice[i] = save[i] + value[p], target[p]
        if save[i] + egress + value[last] < on[i]:
            on[i], choice[i] = save[i] + egress + value[last], target[last]


@njit(cache=True)
def _pause(on: Floats, choice: Ints, save: Floats, place: Ints, off: Floats) -> None:
    """Write the checkpoint and wait, if that is better."""
    for i in range(len(on)):
        if save[i] + off[place[i]] < on[i]:
            on[i], choice[i] = save[i] + off[place[i]], WAIT


@njit(cache=True)
def _begin(off: Floats, choice: Ints, egress: float, value: Floats, target: Ints) -> None:
    """Start on an offer, if that is better; a job that has not started leaves no place."""
    last = len(value) - 1
    for p in range(len(off)):
        if value[p] < off[p]:
            off[p], choice[p] = value[p], target[p]
        leaving = egress if p < last else 0.0
        if leaving + value[last] < off[p]:
            off[p], choice[p] = leaving + value[last], target[last]


def _read(problem: SwitchingProblem, grid: TimeGrid, on_choice: Ints, off_choice: Ints) -> Plan:
    """Read the plan from the choices."""
    start, saving = problem.start_seconds, problem.overheads.checkpoint_seconds
    here, mask, k = problem.running, grid.stocked, 0
    begun = 0.0  # start of the stay, in seconds
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


def offer_path(problem: SwitchingProblem, plan: Plan) -> OfferPath:
    """Dollars and work of a plan that need not do exactly the required work."""
    dollars = moving_dollars(problem, plan)
    work = 0.0
    for number, stay in enumerate(plan):
        offer = problem.offers[stay.offer]
        idle = overhead_seconds(problem, plan, number)
        dollars += offer.dollars(stay.begin_seconds, stay.end_seconds)
        work += offer.rate * (stay.end_seconds - stay.begin_seconds - idle) / HOUR
    return OfferPath(plan, dollars, work)
