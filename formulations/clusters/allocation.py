"""Shares of time of jobs on accelerators: problem, allocation and its rules.

Narayanan, PhD thesis (2021), section 5.3.1: an allocation X gives each job, or pair of jobs that
share accelerators, a fraction of wall-clock time on each worker type; equations 5.1 to 5.3 say
which X are valid. A worker type is a type of accelerator or, where placement counts, a type of
accelerator with all of a job's on one server (consolidated) or anywhere (spread).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stagewright.formulations.clusters.rates import RateTable, rate_table, server_rows
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.workloads.jobs import Entity, Job, Workload
from stagewright.graphs.workloads.pool import Pool

TOLERANCE = 1e-6
"""By how much a valid allocation's sums may exceed 1 or a count, relatively: solvers' rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class AllocationProblem:
    """The active jobs, in order of arrival, and the data that a policy may use.

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
        """The problem of the ``chosen`` jobs only."""
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
        """The same problem for a policy that does not distinguish accelerators."""
        return replace(self, table=self.table.agnostic())

    def equal_throughput(self) -> Floats:
        """Throughputs under X^equal (5.4.1): a job's time is split over types by their number."""
        counts = self.table.counts
        return np.asarray(self._best_rate_of_type() @ (counts / counts.sum()))

    def isolated_throughput(self) -> Floats:
        """Throughputs under X^isolated (5.4.2): each job has 1/n of every type, within its time."""
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
    """The problem of all of a workload's jobs, as if just arrived; see :func:`rate_table`."""
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
    """The allocation problem of ``jobs``, as if they had just arrived."""
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

    Raises InvalidPlan if a pair shares a worker on which its kinds have no rate.
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


def accelerators_of_jobs(problem: AllocationProblem, allocation: Allocation) -> Floats:
    """Mean accelerators of each type per job, half for each job of a pair; (jobs, types)."""
    usage = np.zeros((len(problem), len(problem.table.counts)))
    accelerator = problem.table.accelerator[allocation.worker]
    paired = allocation.partner >= 0
    used = allocation.share * problem.scale[allocation.job] * np.where(paired, 0.5, 1.0)
    np.add.at(usage, (allocation.job, accelerator), used)
    np.add.at(usage, (allocation.partner[paired], accelerator[paired]), used[paired])
    return usage


def check(problem: AllocationProblem, allocation: Allocation) -> None:
    """Equations 5.1 to 5.3 and the rules of pairs and placement, from the definitions.

    Raises InvalidPlan in one line that names the job or the accelerator.
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
