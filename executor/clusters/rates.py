"""Updates of a rate table in a running cluster: accelerators that fail, measured rates."""

import heapq
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from stagewright.executor.clusters.leases import Lease
from stagewright.executor.clusters.rounds import Assignment, Mechanism
from stagewright.formulations.clusters.allocation import AllocationProblem, problem_of_jobs
from stagewright.formulations.clusters.rates import RateTable
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount
from stagewright.graphs.workloads.jobs import Job
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
        left = map(self.mechanism.available, range(len(table.pool.accelerators)))
        return surviving(table, [*left]) if self.lost else table

    def _fail(self, outage: Outage) -> None:
        """Apply a failure; an accelerator that is already down stays down until the later end."""
        place = (outage.accelerator, outage.number)
        end = max(outage.end_seconds, self.lost.get(place, 0.0))
        self.lost[place] = end
        heapq.heappush(self.repairs, (end, *place))
        self.mechanism.lose(outage.accelerator, (outage.number,))


TrainingFunction = Callable[[Lease], object]


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A job and the program that trains it; the program runs once per lease and rank."""

    job: Job
    program: TrainingFunction


def require_runnable(jobs: Sequence[ClusterJob]) -> None:
    """Refuse jobs that cannot run. Raises InputError in one line that names the job."""
    if not jobs:
        raise InputError("there are no jobs to run")
    for each in jobs:
        if each.job.steps != int(each.job.steps):
            raise InputError(
                f"job {each.job.name!r}: steps must be a whole number, got {each.job.steps:g}"
            )
    names = Counter(each.job.name for each in jobs)
    for name, times in names.items():
        if times > 1:
            raise InputError(f"two jobs are named {name!r}")


def require_settings(
    round_seconds: float, grace_seconds: float, patience_seconds: float, feedback: float
) -> None:
    """Refuse settings under which nothing can run.

    Raises InputError in one line that begins with the setting.
    """
    require_amount(grace_seconds, "grace_seconds")
    require_amount(patience_seconds, "patience_seconds")
    require_amount(round_seconds, "round_seconds")
    if round_seconds == 0:
        raise InputError("round_seconds must be more than zero, got 0")
    if not 0 <= feedback <= 1:
        raise InputError(f"feedback must be between 0 and 1, got {feedback:g}")


def problem_after(
    jobs: Sequence[Job], table: RateTable, done: Ints, now_seconds: float
) -> AllocationProblem:
    """The problem of ``jobs`` after ``done`` steps, ``now_seconds`` after the cluster's start."""
    problem = problem_of_jobs(jobs, table)
    elapsed = now_seconds - np.array([job.arrival_seconds for job in jobs])
    return replace(
        problem,
        steps=np.maximum(problem.steps - done, 1.0),
        elapsed_seconds=elapsed,
        isolated_seconds=done / problem.isolated_throughput(),
        deadline_seconds=np.maximum(problem.deadline_seconds - elapsed, 0.0),
    )


_NOTEWORTHY = 0.1  # relative change of a rate that triggers a new target


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """Steps per second of a kind on a worker type, alone or sharing with a job of another kind."""

    kind: int
    beside: int | None
    worker: int
    steps_per_second: float


def surviving(table: RateTable, left: Sequence[int]) -> RateTable:
    """The table of a pool with only ``left`` working accelerators of each type.

    A type without working accelerators stays in the pool, with all rates 0.
    """
    if list(left) == table.counts.tolist():
        return table
    accelerators = []
    for accelerator, count in zip(table.pool.accelerators, left, strict=True):
        size = accelerator.per_server
        if count < accelerator.count:
            has_whole_servers = size is not None and count > 0 and count % size == 0
            accelerator = replace(
                accelerator, count=max(count, 1), per_server=size if has_whole_servers else None
            )
        accelerators.append(accelerator)
    room = np.array(left)[table.accelerator]
    alone = np.where(table.uses <= room, table.alone, 0.0)
    kept = (alone[table.first, table.worker] > 0) & (alone[table.second, table.worker] > 0)
    return replace(table.with_pairs(kept), pool=Pool(tuple(accelerators)), alone=alone)


def measured(table: RateTable, rates: Iterable[MeasuredRate], weight: float) -> RateTable:
    """The table updated by ``rates``: an exponential average with ``weight`` for the newest."""
    alone, paired = table.alone.copy(), table.paired.copy()
    for rate in rates:
        if rate.beside is None:
            values, place = alone, (rate.kind, rate.worker)
        else:
            first, second = sorted((rate.kind, rate.beside))
            row = np.flatnonzero(
                (table.first == first) & (table.second == second) & (table.worker == rate.worker)
            )
            values, place = paired, (int(row[0]), int(rate.kind != first))
        values[place] += weight * (rate.steps_per_second - values[place])
    return replace(table, alone=alone, paired=paired)


def corrected(believed: RateTable, true: RateTable, kind: int, worker: int) -> RateTable:
    """The believed table with one of the true rates, the same table if it had it."""
    rate = float(true.alone[kind, worker])
    if believed.alone[kind, worker] == rate:
        return believed
    return measured(believed, [MeasuredRate(kind, None, worker, rate)], weight=1.0)


RatePlace = tuple[str, str, int, str]
"""What a rate is of: a model, an accelerator, how many of them, and their placement."""


def place_of_rate(table: RateTable, kind: int, worker: int) -> RatePlace:
    """What a rate of the table is of."""
    here = table.workers[worker]
    name, count = table.pool.names[here.accelerator], int(table.uses[kind, worker])
    return table.kinds[kind][0], name, count, here.placement or "consolidated"


def has_moved(table: RateTable, before: RateTable) -> bool:
    """Whether a rate differs enough from ``before`` to trigger a new target."""
    return any(
        bool((np.abs(now - then) > _NOTEWORTHY * then).any())
        for now, then in ((table.alone, before.alone), (table.paired, before.paired))
    )


@dataclass(slots=True)
class LeasedJob:
    """A job with an active lease: its processes and their place."""

    epoch: int
    refs: list[Any]
    nodes: list[str]
    worker: int
    accelerators: tuple[int, ...]
    sharing: int  # jobs on these accelerators

    @property
    def place(self) -> tuple[int, tuple[int, ...], int]:
        """Worker type, accelerators, and jobs on them."""
        return self.worker, self.accelerators, self.sharing


@dataclass(slots=True)
class CurrentRound:
    """The current round: its target, the jobs in it, and the run times of those that ended."""

    target: Floats
    there: list[int]
    began: float = field(default_factory=time.monotonic)
    ran: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds since the round began."""
        return time.monotonic() - self.began


Place = tuple[int, tuple[int, ...], int]


def place_of(assignment: Assignment) -> Place:
    """Worker type, accelerators, and jobs on them."""
    return assignment.worker, assignment.accelerators, len(assignment.jobs)


def measurements(
    leased: Mapping[int, LeasedJob], rates: Mapping[int, float], kind_of: Callable[[int], int]
) -> list[MeasuredRate]:
    """The measured ``rates`` of jobs with a lease, each with the kind of its partner.

    Without jobs whose partner has ended.
    """
    found = []
    for job, rate in rates.items():
        own = leased[job]
        partners = [
            kind_of(other)
            for other, lease in leased.items()
            if other != job and lease.place == own.place
        ]
        if len(partners) == own.sharing - 1:
            partner = partners[0] if partners else None
            found.append(MeasuredRate(kind_of(job), partner, own.worker, rate))
    return found
