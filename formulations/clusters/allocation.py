"""Shares of time of jobs on accelerators: problem, allocation and its rules.

Narayanan, PhD thesis (2021), section 5.3.1: an allocation X gives each job, or pair of jobs that
share accelerators, a fraction of wall-clock time on each worker type; equations 5.1 to 5.3 say
which X are valid. A worker type is a type of accelerator or, where placement counts, a type of
accelerator with all of a job's on one server (consolidated) or anywhere (spread).

A move takes time. Of a lease of L seconds that begins with a move of c seconds, a job computes for
L / (L + c) of the time; where the job is now, for all of it. Policies count these rates, so that a
job moves only if that gains more than it costs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from stagewright.formulations.clusters.rates import RateTable, rate_table, server_rows
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.workloads.jobs import Entity, Job, Workload, counts_of
from stagewright.graphs.workloads.pool import Pool

TOLERANCE = 1e-6
"""By how much a valid allocation's sums may exceed 1 or a count, relatively: solvers' rounding."""
RESTARTS = 0.05
"""The part of a job's time that restarts may take: rounds keep a job where it is until then."""


@dataclass(frozen=True, slots=True, eq=False)
class AllocationProblem:
    """The active jobs, in order of arrival, and the data that a policy may use.

    ``kind`` indexes ``table.kinds``; ``steps`` are still to run; ``elapsed_seconds`` are since
    arrival; ``isolated_seconds`` is how long the steps already run would have taken on 1/n of the
    cluster; ``deadline_seconds`` is the time left until a job's SLO (inf for none);
    ``restart_seconds`` is what a move costs a job; ``current`` is the worker type that it has now,
    or -1; ``entity`` indexes ``entities``. All arrays have shape (jobs,). The next allocation is
    ``lease_seconds`` away at least; inf where moves cost nothing.
    """

    names: tuple[str, ...]
    table: RateTable
    kind: Ints
    weight: Floats
    steps: Floats
    elapsed_seconds: Floats
    isolated_seconds: Floats
    deadline_seconds: Floats
    restart_seconds: Floats
    current: Ints
    entity: Ints
    entities: tuple[Entity, ...] = ()
    lease_seconds: float = math.inf

    def __len__(self) -> int:
        return len(self.names)

    @property
    def scale(self) -> Ints:
        """The most accelerators that each job runs on at once."""
        return np.asarray(self.table.uses.max(axis=1)[self.kind])

    @property
    def uses(self) -> Ints:
        """Accelerators that each job takes on each worker type, shape (jobs, workers)."""
        return self.table.uses[self.kind]

    @property
    def rates(self) -> Floats:
        """Steps per second of each job alone on each worker type, shape (jobs, workers)."""
        return self.table.alone[self.kind]

    @property
    def kept(self) -> Floats:
        """Part of each rate that a lease leaves after the move to it, shape (jobs, workers).

        A lease is as long as rounds keep a job in place, and no longer than the job runs where it
        is. Who shares accelerators with whom does not count.
        """
        stays = np.flatnonzero(self.current >= 0)
        now = np.zeros(len(self))
        now[stays] = self.rates[stays, self.current[stays]]
        left = np.divide(self.steps, now, out=np.full(len(self), np.inf), where=now > 0)
        lease = np.maximum(self.lease_seconds, self.restart_seconds / RESTARTS)
        part = 1 / (1 + self.restart_seconds / np.minimum(lease, left))
        kept = np.repeat(part[:, None], len(self.table.workers), axis=1)
        kept[stays, self.current[stays]] = 1.0
        return np.asarray(kept)

    @property
    def alike(self) -> Ints:
        """Equal numbers for jobs of one kind to which moves cost the same, by kind; (jobs,)."""
        keys = np.column_stack([self.kind, self.current, self.kept.min(axis=1)])
        return np.asarray(np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1))

    @property
    def elastic(self) -> bool:
        """Whether a job chooses among counts."""
        return any(len(counts_of(self.table.kinds[kind])) > 1 for kind in np.unique(self.kind))

    def best_rates(self) -> Floats:
        """Steps per second of each job where it is fastest, alone or with a partner at hand.

        Moves are counted of jobs alone.
        """
        table = self.table
        best = np.zeros(len(table.kinds))
        present = np.bincount(self.kind, minlength=len(table.kinds))
        partners = present[table.second] - (table.first == table.second)
        np.maximum.at(best, table.first, np.where(partners > 0, table.paired[:, 0], 0.0))
        partners = present[table.first] - (table.first == table.second)
        np.maximum.at(best, table.second, np.where(partners > 0, table.paired[:, 1], 0.0))
        return np.asarray(np.maximum(best[self.kind], (self.rates * self.kept).max(axis=1)))

    def of(self, chosen: Bools | Ints) -> "AllocationProblem":
        """The problem of the ``chosen`` jobs only."""
        arrays: dict[str, Any] = {
            field.name: values[chosen]
            for field in fields(self)
            if isinstance(values := getattr(self, field.name), np.ndarray)
        }
        names = np.array(self.names, dtype=object)[chosen]
        return replace(self, names=tuple(names.tolist()), **arrays)

    def agnostic(self) -> "AllocationProblem":
        """The same problem for a policy that does not distinguish accelerators."""
        return replace(self, table=self.table.agnostic())

    def fair_throughput(self) -> Floats:
        """Throughputs of one accelerator under X^equal (5.4.1): its type is any, by their number.

        A job on s accelerators has them 1 / s of the time: the thesis's T(X^equal) / scale.
        """
        table, counts = self.table, self.table.counts
        of_one = table.alone / np.maximum(table.uses, 1)
        best = np.zeros((len(table.kinds), len(counts)))
        np.maximum.at(best.T, table.accelerator, of_one.T)
        return np.asarray((best @ (counts / counts.sum()))[self.kind])

    def isolated_throughput(self) -> Floats:
        """Throughputs under X^isolated (5.4.2): each job has 1/n of every type, within its time."""
        share, worker = self.parted(np.full(len(self), 1 / len(self)))
        rate = np.take_along_axis(self.rates, worker, axis=1)
        return np.asarray((rate * share).sum(axis=1))

    def parted(self, part: Floats) -> tuple[Floats, Ints]:
        """Time with ``part`` of every type, and the best worker type there, each (jobs, types).

        ``part`` has shape (jobs,). Of several counts a job takes the one on which it does most.
        """
        table, jobs = self.table, np.arange(len(self))
        shape = len(self), len(table.counts)
        share, chosen = np.zeros(shape), np.zeros(shape, dtype=np.int64)
        for number, count in enumerate(table.counts):
            here = np.flatnonzero(table.accelerator == number)
            uses = self.uses[:, here]
            time = np.divide(part[:, None] * count, uses, out=np.zeros(uses.shape), where=uses > 0)
            best = (self.rates[:, here] * np.minimum(time, 1.0)).argmax(axis=1)
            share[:, number], chosen[:, number] = time[jobs, best], here[best]
        return share / np.maximum(1.0, share.sum(axis=1, keepdims=True)), chosen


def problem_of(
    workload: Workload, pool: Pool, *, space_sharing: bool = False, placement: bool = False
) -> AllocationProblem:
    """The problem of all of a workload's jobs, as if just arrived; see :func:`rate_table`."""
    table = rate_table(
        workload.throughputs,
        pool,
        [job.kind for job in workload.jobs],
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
        np.array([table.index[job.kind] for job in jobs], dtype=np.int64),
        np.array([job.weight for job in jobs]),
        np.array([job.steps for job in jobs]),
        zeros,
        zeros,
        np.array([np.inf if job.slo_seconds is None else job.slo_seconds for job in jobs]),
        np.array([job.move_seconds for job in jobs]),
        np.full(len(jobs), -1),
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
    """Effective throughput of each job, steps per second (5.3.1), moves counted, shape (jobs,).

    Raises InvalidPlan if a pair shares a worker on which its kinds have no rate.
    """
    found, kept = np.zeros(len(problem)), problem.kept
    alone = allocation.partner < 0
    job, worker = allocation.job[alone], allocation.worker[alone]
    np.add.at(found, job, problem.rates[job, worker] * kept[job, worker] * allocation.share[alone])
    if alone.all():
        return found
    job, partner = allocation.job[~alone], allocation.partner[~alone]
    pair = _pair_rows(problem, allocation, ~alone)
    share, worker = allocation.share[~alone], allocation.worker[~alone]
    for side, members in enumerate((job, partner)):
        rate = problem.table.paired[pair, side] * kept[members, worker]
        np.add.at(found, members, rate * share)
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
    uses = problem.uses[allocation.job, allocation.worker]
    np.add.at(used, problem.table.accelerator[allocation.worker], allocation.share * uses)
    return used


def accelerators_of_jobs(problem: AllocationProblem, allocation: Allocation) -> Floats:
    """Mean accelerators of each type per job, half for each job of a pair; (jobs, types)."""
    usage = np.zeros((len(problem), len(problem.table.counts)))
    accelerator = problem.table.accelerator[allocation.worker]
    paired = allocation.partner >= 0
    uses = problem.uses[allocation.job, allocation.worker]
    used = allocation.share * uses * np.where(paired, 0.5, 1.0)
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
    used = np.zeros(problem.table.alone.shape)
    np.add.at(used, (problem.kind[allocation.job], allocation.worker), allocation.share)
    for number, parts, servers in server_rows(problem.table):
        total = float((parts * used).sum())
        if total > servers * (1 + TOLERANCE):
            raise InvalidPlan(
                f"consolidated jobs need {total:.9g} servers of "
                f"{problem.table.pool.names[number]!r}, there are {servers}"
            )
