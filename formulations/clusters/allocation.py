"""Who gets which accelerator for what share of the time: problem, allocation and its rules.

Narayanan, PhD thesis (2021), section 5.3.1: an allocation X gives each job, or pair of jobs that
share accelerators, a fraction of wall-clock time on each worker type; equations 5.1 to 5.3 say
which X are valid. A worker type is a type of accelerator or, where placement counts, a type of
accelerator with all of a job's on one server (consolidated) or anywhere (spread).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.workloads.jobs import Entity, Job, Throughputs, Workload
from stagewright.graphs.workloads.pool import Pool

TOLERANCE = 1e-6
"""By how much a valid allocation's sums may exceed 1 or a count, relatively: solvers' rounding."""


@dataclass(frozen=True, slots=True)
class WorkerType:
    """An accelerator type (its position in the pool), and the placement where that counts."""

    name: str
    accelerator: int
    placement: str | None = None  # "consolidated", "spread"; None where placement does not count


@dataclass(frozen=True, slots=True, eq=False)
class RateTable:
    """How fast jobs of every kind, a (model, scale), run on every worker type.

    ``alone`` has shape (kinds, workers), steps per second, 0 where a kind does not run. A pair p
    of kinds ``first[p] <= second[p]`` of equal scale runs on ``worker[p]`` at ``paired[p]``, shape
    (pairs, 2). Pairs that do no more than taking turns are left out: they can never help.
    """

    pool: Pool
    workers: tuple[WorkerType, ...]
    kinds: tuple[tuple[str, int], ...]
    scale: Ints
    alone: Floats
    first: Ints
    second: Ints
    worker: Ints
    paired: Floats
    index: dict[tuple[str, int], int] = field(repr=False)

    @property
    def counts(self) -> Ints:
        """Accelerators of each type in the pool, shape (types,)."""
        return np.array([accelerator.count for accelerator in self.pool.accelerators])

    @property
    def accelerator(self) -> Ints:
        """Position in the pool of each worker type's accelerator, shape (workers,)."""
        return np.array([worker.accelerator for worker in self.workers])

    def agnostic(self) -> "RateTable":
        """The table of a policy that takes all accelerators for alike: each kind's best, no pairs.

        A kind still runs only where it can.
        """
        best = self.alone.max(axis=1, keepdims=True)
        none = np.zeros(0, dtype=np.int64)
        return replace(
            self,
            alone=np.where(self.alone > 0, best, 0.0),
            first=none,
            second=none,
            worker=none,
            paired=np.zeros((0, 2)),
        )


def rate_table(
    throughputs: Throughputs,
    pool: Pool,
    kinds: Sequence[tuple[str, int]],
    *,
    space_sharing: bool = False,
    placement: bool = False,
) -> RateTable:
    """The table of ``kinds`` on ``pool``.

    Raises
    ------
    InputError
        If a rate is missing, a kind fits nowhere or runs nowhere, or placement is asked for and
        a type of accelerator has no servers.
    """
    workers = _worker_types(pool, placement)
    kinds = tuple(dict.fromkeys(kinds))
    index = {kind: position for position, kind in enumerate(kinds)}
    alone = _alone(throughputs, pool, workers, kinds)
    pairs = _pairs(throughputs, pool, workers, index, alone) if space_sharing else []
    return RateTable(
        pool,
        workers,
        kinds,
        np.array([scale for _, scale in kinds]),
        alone,
        np.array([pair[0] for pair in pairs], dtype=np.int64),
        np.array([pair[1] for pair in pairs], dtype=np.int64),
        np.array([pair[2] for pair in pairs], dtype=np.int64),
        np.array([pair[3:] for pair in pairs], dtype=float).reshape(-1, 2),
        index,
    )


def _worker_types(pool: Pool, placement: bool) -> tuple[WorkerType, ...]:
    if not placement:
        return tuple(WorkerType(name, number) for number, name in enumerate(pool.names))
    workers = []
    for number, accelerator in enumerate(pool.accelerators):
        if accelerator.per_server is None:
            raise InputError(
                f"accelerator {accelerator.name!r}: placement needs servers; write for example "
                f"{accelerator.name}={-(-accelerator.count // 4)}x4"
            )
        workers.append(WorkerType(accelerator.name, number, "consolidated"))
        workers.append(WorkerType(f"{accelerator.name} spread", number, "spread"))
    return tuple(workers)


def _alone(
    throughputs: Throughputs,
    pool: Pool,
    workers: tuple[WorkerType, ...],
    kinds: tuple[tuple[str, int], ...],
) -> Floats:
    rates = {(rate.model, rate.scale, rate.accelerator): rate for rate in throughputs.alone}
    known = {rate.accelerator for rate in throughputs.alone}
    for name in pool.names:
        if name not in known:
            raise InputError(
                f"unknown accelerator {name!r}: the throughputs know {', '.join(sorted(known))}"
            )
    alone = np.zeros((len(kinds), len(workers)))
    for row, (model, scale) in enumerate(kinds):
        for column, worker in enumerate(workers):
            accelerator = pool.accelerators[worker.accelerator]
            rate = rates.get((model, scale, accelerator.name))
            if rate is None:
                raise InputError(
                    f"no throughput of {model!r} on {scale} x {accelerator.name!r}: add it, or 0 "
                    "steps per second if it does not run there"
                )
            if scale > accelerator.count or (worker.placement == "spread" and scale == 1):
                continue  # one accelerator is always consolidated
            found = rate.steps_per_second
            if worker.placement == "spread":
                found = rate.spread_steps_per_second or 0.0
            alone[row, column] = found
        _require_place(pool, (model, scale), alone[row])
    return alone


def _require_place(pool: Pool, kind: tuple[str, int], rates: Floats) -> None:
    if rates.any():
        return
    model, scale = kind
    largest = max(pool.accelerators, key=lambda accelerator: accelerator.count)
    if scale > largest.count:
        raise InputError(
            f"a job of {model!r} asks for {scale} accelerators of one type, the cluster has at "
            f"most {largest.count} ({largest.name!r}): lower the job's scale"
        )
    raise InputError(f"{model!r} on {scale} accelerators runs nowhere in this cluster: all rates 0")


def _pairs(
    throughputs: Throughputs,
    pool: Pool,
    workers: tuple[WorkerType, ...],
    index: dict[tuple[str, int], int],
    alone: Floats,
) -> list[tuple[float, ...]]:
    """Rows (first kind, second kind, worker, its rates) of the pairs that beat taking turns."""
    found: list[tuple[float, ...]] = []
    columns = {
        (pool.names[worker.accelerator], worker.placement): column
        for column, worker in enumerate(workers)
    }
    for pair in throughputs.pairs:
        a, b = (index.get((model, pair.scale)) for model in pair.models)
        if a is None or b is None:
            continue
        for placement in (None, "consolidated", "spread"):
            column = columns.get((pair.accelerator, placement))
            rates = pair.spread_steps_per_second if placement == "spread" else pair.steps_per_second
            if column is None or rates is None:
                continue
            x, y = rates
            if not (alone[a, column] and alone[b, column]):
                continue
            if x / alone[a, column] + y / alone[b, column] > 1 + 1e-9:
                found.append((a, b, column, x, y) if a <= b else (b, a, column, y, x))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class AllocationProblem:
    """The active jobs, in order of arrival, and what a policy may know about them.

    ``kind`` indexes ``table.kinds``; ``steps`` are still to run; ``elapsed_seconds`` are since
    arrival; ``isolated_seconds`` is how long the steps already run would have taken on 1/n of the
    cluster; ``deadline_seconds`` is the time left until a job's SLO (inf for none); ``entity``
    indexes ``entities``. All arrays have shape (jobs,).
    """

    names: tuple[str, ...]
    table: RateTable
    kind: Ints
    weight: Floats
    steps: Floats
    elapsed_seconds: Floats
    isolated_seconds: Floats
    deadline_seconds: Floats
    entity: Ints
    entities: tuple[Entity, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def scale(self) -> Ints:
        """Accelerators that each job runs on at once."""
        return self.table.scale[self.kind]

    @property
    def rates(self) -> Floats:
        """Steps per second of each job alone on each worker type, shape (jobs, workers)."""
        return self.table.alone[self.kind]

    def best_rates(self) -> Floats:
        """Steps per second of each job where it is fastest, alone or with a partner at hand."""
        table = self.table
        best = table.alone.max(axis=1)
        present = np.bincount(self.kind, minlength=len(table.kinds))
        partners = present[table.second] - (table.first == table.second)
        np.maximum.at(best, table.first, np.where(partners > 0, table.paired[:, 0], 0.0))
        partners = present[table.first] - (table.first == table.second)
        np.maximum.at(best, table.second, np.where(partners > 0, table.paired[:, 1], 0.0))
        return np.asarray(best[self.kind])

    def of(self, chosen: Bools) -> "AllocationProblem":
        """The problem of the ``chosen`` jobs alone."""
        return replace(
            self,
            names=tuple(name for name, one in zip(self.names, chosen, strict=True) if one),
            kind=self.kind[chosen],
            weight=self.weight[chosen],
            steps=self.steps[chosen],
            elapsed_seconds=self.elapsed_seconds[chosen],
            isolated_seconds=self.isolated_seconds[chosen],
            deadline_seconds=self.deadline_seconds[chosen],
            entity=self.entity[chosen],
        )

    def agnostic(self) -> "AllocationProblem":
        """The same problem as a policy sees it that takes all accelerators for alike."""
        return replace(self, table=self.table.agnostic())

    def equal_throughput(self) -> Floats:
        """Of X^equal (5.4.1): a job's time is split over the accelerators by their number."""
        counts = self.table.counts
        return np.asarray(self._best_rate_of_type() @ (counts / counts.sum()))

    def isolated_throughput(self) -> Floats:
        """Of X^isolated (5.4.2): each job has 1/n of every type, at most all of its time."""
        share = self.table.counts / (len(self) * self.scale[:, None])
        share /= np.maximum(1.0, share.sum(axis=1, keepdims=True))
        return np.asarray((self._best_rate_of_type() * share).sum(axis=1))

    def _best_rate_of_type(self) -> Floats:
        """Steps per second on each type of accelerator, best placement, shape (jobs, types)."""
        best = np.zeros((len(self.table.kinds), len(self.table.pool.accelerators)))
        for column, accelerator in enumerate(self.table.accelerator):
            best[:, accelerator] = np.maximum(best[:, accelerator], self.table.alone[:, column])
        return np.asarray(best[self.kind])


def problem_of(
    workload: Workload, pool: Pool, *, space_sharing: bool = False, placement: bool = False
) -> AllocationProblem:
    """All of the workload's jobs at once, as if they had just arrived; see :func:`rate_table`."""
    table = rate_table(
        workload.throughputs,
        pool,
        [(job.model, job.scale) for job in workload.jobs],
        space_sharing=space_sharing,
        placement=placement,
    )
    return problem_of_jobs(workload.jobs, table, workload.entities)


def problem_of_jobs(
    jobs: Sequence[Job], table: RateTable, entities: tuple[Entity, ...] = ()
) -> AllocationProblem:
    """``jobs`` as if they had just arrived."""
    position = {entity.name: number for number, entity in enumerate(entities)}
    zeros = np.zeros(len(jobs))
    return AllocationProblem(
        tuple(job.name for job in jobs),
        table,
        np.array([table.index[job.model, job.scale] for job in jobs], dtype=np.int64),
        np.array([job.weight for job in jobs]),
        np.array([job.steps for job in jobs]),
        zeros,
        zeros,
        np.array([np.inf if job.slo_seconds is None else job.slo_seconds for job in jobs]),
        np.array([position.get(job.entity or "", -1) for job in jobs], dtype=np.int64),
        entities,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """X as a list: ``job[i]``, with ``partner[i]`` or -1, has ``share[i]`` of time.

    It has that on ``worker[i]``. Of a pair, ``job`` is the one whose kind comes first in the table.
    """

    job: Ints
    partner: Ints
    worker: Ints
    share: Floats

    def dense(self, jobs: int, workers: int) -> Floats:
        """Share of time of each job on each worker type, alone or paired, shape (jobs, workers)."""
        shares = np.zeros((jobs, workers))
        np.add.at(shares, (self.job, self.worker), self.share)
        paired = self.partner >= 0
        np.add.at(shares, (self.partner[paired], self.worker[paired]), self.share[paired])
        return shares


def allocation_of_shares(shares: Floats) -> Allocation:
    """The allocation without space sharing whose matrix X is ``shares``, (jobs, workers)."""
    job, worker = np.nonzero(shares > 0)
    return Allocation(job, np.full(len(job), -1), worker, shares[job, worker])


def throughput(problem: AllocationProblem, allocation: Allocation) -> Floats:
    """Effective throughput of each job, steps per second (5.3.1), shape (jobs,).

    Raises
    ------
    InvalidPlan
        If a pair shares a worker on which its kinds have no rate.
    """
    found = np.zeros(len(problem))
    alone = allocation.partner < 0
    job, worker = allocation.job[alone], allocation.worker[alone]
    np.add.at(found, job, problem.rates[job, worker] * allocation.share[alone])
    if alone.all():
        return found
    job, partner = allocation.job[~alone], allocation.partner[~alone]
    share, pair = allocation.share[~alone], _pair_rows(problem, allocation, ~alone)
    np.add.at(found, job, problem.table.paired[pair, 0] * share)
    np.add.at(found, partner, problem.table.paired[pair, 1] * share)
    return found


def _pair_rows(problem: AllocationProblem, allocation: Allocation, chosen: Bools) -> Ints:
    table = problem.table
    rows = {
        key: row
        for row, key in enumerate(
            zip(table.first.tolist(), table.second.tolist(), table.worker.tolist(), strict=True)
        )
    }
    found = []
    for job, partner, worker in zip(
        allocation.job[chosen].tolist(),
        allocation.partner[chosen].tolist(),
        allocation.worker[chosen].tolist(),
        strict=True,
    ):
        row = rows.get((int(problem.kind[job]), int(problem.kind[partner]), worker))
        if row is None:
            raise InvalidPlan(
                f"jobs {problem.names[job]!r} and {problem.names[partner]!r} have no rate together "
                f"on {table.workers[worker].name!r}"
            )
        found.append(row)
    return np.array(found, dtype=np.int64)


def accelerators_in_use(problem: AllocationProblem, allocation: Allocation) -> Floats:
    """Mean number of accelerators of each type of the pool that work, shape (types,).

    A pair takes its accelerators once.
    """
    used = np.zeros(len(problem.table.pool.accelerators))
    scale = problem.scale[allocation.job]
    np.add.at(used, problem.table.accelerator[allocation.worker], allocation.share * scale)
    return used


def check(problem: AllocationProblem, allocation: Allocation) -> None:
    """Equations 5.1 to 5.3 and the rules of pairs and placement, from the definitions.

    Raises
    ------
    InvalidPlan
        In one line that names the job or the accelerator.
    """
    _check_entries(problem, allocation)
    throughput(problem, allocation)  # every pair has a rate
    shares = allocation.dense(len(problem), len(problem.table.workers))
    time = shares.sum(axis=1)
    if (time > 1 + TOLERANCE).any():
        job = int(time.argmax())
        raise InvalidPlan(f"job {problem.names[job]!r} runs {time[job]:.9g} of the time")
    used = accelerators_in_use(problem, allocation)
    for of_type, accelerator in zip(used, problem.table.pool.accelerators, strict=True):
        if of_type > accelerator.count * (1 + TOLERANCE):
            raise InvalidPlan(
                f"{of_type:.9g} accelerators {accelerator.name!r} are in use on average, there are "
                f"{accelerator.count}"
            )
    _check_servers(problem, allocation)


def _check_entries(problem: AllocationProblem, allocation: Allocation) -> None:
    if ((allocation.share < 0) | ~np.isfinite(allocation.share)).any():
        raise InvalidPlan("a share is negative or not finite")
    jobs, workers = len(problem), len(problem.table.workers)
    lengths = {len(getattr(allocation, name)) for name in ("job", "partner", "worker", "share")}
    if len(lengths) > 1:
        raise InvalidPlan("job, partner, worker and share differ in length")
    for values, low, high, what in (
        (allocation.job, 0, jobs, "job"),
        (allocation.partner, -1, jobs, "partner"),
        (allocation.worker, 0, workers, "worker"),
    ):
        if ((values < low) | (values >= high)).any():
            raise InvalidPlan(f"a {what} is not one of the problem's")
    if (allocation.job == allocation.partner).any():
        raise InvalidPlan("a job shares accelerators with itself")
    alone = allocation.partner < 0
    rate = problem.rates[allocation.job, allocation.worker]
    if (alone & (rate == 0) & (allocation.share > TOLERANCE)).any():
        job = int(allocation.job[alone & (rate == 0) & (allocation.share > TOLERANCE)][0])
        raise InvalidPlan(f"job {problem.names[job]!r} has time where it does not run")


def _check_servers(problem: AllocationProblem, allocation: Allocation) -> None:
    used = np.zeros((len(problem.table.workers), len(problem.table.kinds)))
    np.add.at(used, (allocation.worker, problem.kind[allocation.job]), allocation.share)
    for worker, coefficients, servers in server_rows(problem.table):
        total = coefficients @ used[worker]
        if total > servers * (1 + TOLERANCE):
            raise InvalidPlan(
                f"consolidated jobs need {total:.9g} servers of "
                f"{problem.table.workers[worker].name!r}, there are {servers}"
            )


def server_rows(table: RateTable) -> list[tuple[int, Floats, int]]:
    """What consolidated jobs ask of servers: (worker, servers per job of each kind, servers).

    Jobs on whole servers are a bin packing. The dual feasible functions u_k of Fekete and
    Schepers (2001) turn sizes into parts of a server such that no packing exceeds one a server.
    """
    rows = []
    for worker, kind in enumerate(table.workers):
        accelerator = table.pool.accelerators[kind.accelerator]
        if kind.placement != "consolidated" or accelerator.per_server is None:
            continue
        size = accelerator.per_server
        seen = {tuple(table.scale / size)}  # as eq. 5.3 has it
        for k in range(1, size):
            parts = np.array([_server_part(int(scale), size, k) for scale in table.scale])
            if tuple(parts) not in seen and (parts > table.scale / size).any():
                seen.add(tuple(parts))
                rows.append((worker, parts, accelerator.servers))
    return rows


def _server_part(scale: int, size: int, k: int) -> float:
    whole, rest = divmod(scale, size)
    times = (k + 1) * rest
    return whole + (rest / size if times % size == 0 else times // size / k)
