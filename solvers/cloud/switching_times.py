"""The times at which some optimal plan starts and ends stays."""

from dataclasses import dataclass

import numpy as np

from stagewright.formulations.cloud.switching import (
    SwitchingProblem,
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
