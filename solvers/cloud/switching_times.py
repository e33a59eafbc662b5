"""The times at which some best plan begins, leaves and takes up instances."""

from dataclasses import dataclass

import numpy as np

from stagewright.formulations.cloud.switching import (
    SwitchingProblem,
)
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.workloads.prices import HOUR

SAME_MOMENT = 1e-6  # seconds; times of the order of 1e9 s are not told apart better


def price_rows(problem: SwitchingProblem) -> tuple[Floats, Floats]:
    """Moments (E,), the start and all price changes, and dollars per hour of each offer (n, E)."""
    begin, end = problem.start_seconds, problem.deadline_seconds
    changes = {at for offer in problem.offers for at in offer.series.seconds if begin < at < end}
    times = np.array([begin, *sorted(changes)])
    prices = np.empty((len(problem.offers), len(times)))
    for row, offer in zip(prices, problem.offers, strict=True):
        at = np.searchsorted(np.array(offer.series.seconds), times, side="right") - 1
        row[:] = np.array(offer.series.dollars_per_hour)[at] * offer.instances
    return times, prices


def places(problem: SwitchingProblem) -> list[int]:
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
class TimeSpan:
    """Dollars and hours of work of each offer in a span of time from each moment, (K, n).

    ``after`` (K,) is the moment at which the span ends, K where that is past the deadline.
    """

    after: Ints
    dollars: Floats
    work: Floats


@dataclass(frozen=True, slots=True, eq=False)
class TimeGrid:
    """The moments of the dynamic program, seconds after the start, and what lies between them.

    From each moment on: ``stay`` until the next; ``save`` a checkpoint on the offer that is left
    (its end is rounded up to a moment, for one who waits then); ``move`` from the checkpoint's end
    to the first moment after the restore; ``begin`` the same for one who has been waiting;
    ``restore_dollars`` (K,) of the offer where a restore costs least.
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
        """All moments at which a best plan of the relaxed problem may do something.

        A move that is begun at s touches prices at s, when the checkpoint is written and when the
        job runs again: it is best begun where one of these meets a price change.
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
            """What is paid from ``wait`` seconds on, until the first moment after ``idle`` more."""
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
    """The changes and the times that are a shift before one; the last is the deadline."""
    every = np.unique(np.concatenate([changes - shift for shift in shifts]))
    every = every[(every >= 0) & (every < changes[-1] - SAME_MOMENT)]
    apart = np.concatenate([[True], np.diff(every) > SAME_MOMENT])
    return np.append(every[apart], changes[-1])
