"""Accelerators that fail and come back."""

import heapq
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from stagewright.executor.clusters.rounds import Mechanism
from stagewright.formulations.clusters.rates import RateTable
from stagewright.graphs.workloads.pool import Pool

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outage:
    """A time in which accelerator ``number`` of a type (by position in the pool) is down."""

    start_seconds: float
    end_seconds: float
    accelerator: int
    number: int


def outages(
    pool: Pool, mean_seconds_to_failure: float, repair_seconds: float, seed: int = 0
) -> Iterator[Outage]:
    """Endless failures in order of time: a Poisson process for each accelerator."""
    draw = random.Random(seed)
    counts = [accelerator.count for accelerator in pool.accelerators]
    now = 0.0
    while True:
        now += draw.expovariate(sum(counts) / mean_seconds_to_failure)
        accelerator = draw.choices(range(len(counts)), counts)[0]
        number = draw.randrange(counts[accelerator])
        yield Outage(now, now + repair_seconds, accelerator, number)


class Peekable(Generic[T]):
    """An iterator with a look at its next item."""

    def __init__(self, items: Iterable[T]) -> None:
        self.items = iter(items)
        self.front: T | None = next(self.items, None)

    def peek(self) -> T | None:
        """The next item; None after the last."""
        return self.front

    def __next__(self) -> T:
        if self.front is None:
            raise StopIteration
        taken, self.front = self.front, next(self.items, None)
        return taken


class DownAccelerators:
    """The accelerators that are down now or will be down.

    Failures and repairs are reported to ``mechanism``.
    """

    def __init__(self, failures: Iterable[Outage], mechanism: Mechanism) -> None:
        self.mechanism = mechanism
        self.failing = Peekable(failures)
        self.repairs: list[tuple[float, int, int]] = []
        self.lost: dict[tuple[int, int], float] = {}

    def update(self, now: float) -> bool:
        """Apply repairs and failures up to ``now``; returns whether there were any."""
        changed = False
        while self.repairs and self.repairs[0][0] <= now:
            end, accelerator, number = heapq.heappop(self.repairs)
            if self.lost.get((accelerator, number)) == end:
                del self.lost[accelerator, number]
                self.mechanism.restore(accelerator, (number,))
                changed = True
        while (outage := self.failing.peek()) is not None and outage.start_seconds <= now:
            self._fail(next(self.failing))
            changed = True
        return changed

    def before(self, end: float) -> dict[tuple[int, int], float]:
        """Accelerators that fail before ``end``, with their times of failure."""
        found: dict[tuple[int, int], float] = {}
        while (outage := self.failing.peek()) is not None and outage.start_seconds < end:
            next(self.failing)
            found.setdefault((outage.accelerator, outage.number), outage.start_seconds)
            self._fail(outage)
        return found

    def events(self) -> list[float]:
        """Times of the next failure and of the next repair."""
        times = []
        if (outage := self.failing.peek()) is not None:
            times.append(outage.start_seconds)
        if self.repairs:
            times.append(self.repairs[0][0])
        return times

    def working(self, table: RateTable) -> RateTable:
        """``table`` for the accelerators that are up."""
        if not self.lost:
            return table
        accelerators, alone = [], table.alone.copy()
        for position, accelerator in enumerate(table.pool.accelerators):
            left = self.mechanism.available(position)
            size = accelerator.per_server
            accelerators.append(
                replace(
                    accelerator,
                    count=max(left, 1),
                    per_server=size if size and left and left % size == 0 else None,
                )
            )
            alone[(table.uses > left) & (table.accelerator == position)] = 0.0
        kept = np.flatnonzero(alone[table.first, table.worker] > 0)
        return replace(
            table,
            pool=replace(table.pool, accelerators=tuple(accelerators)),
            alone=alone,
            first=table.first[kept],
            second=table.second[kept],
            worker=table.worker[kept],
            paired=table.paired[kept],
        )

    def _fail(self, outage: Outage) -> None:
        """Apply a failure; an accelerator that is already down stays down until the later end."""
        place = (outage.accelerator, outage.number)
        end = max(outage.end_seconds, self.lost.get(place, 0.0))
        self.lost[place] = end
        heapq.heappush(self.repairs, (end, *place))
        self.mechanism.lose(outage.accelerator, (outage.number,))
