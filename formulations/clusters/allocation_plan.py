"""The allocation as a JSON document."""

import hashlib
import os
from typing import Literal

import numpy as np

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, check
from stagewright.formulations.plans.envelope import Envelope
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.workloads.jobs import Workload
from stagewright.graphs.workloads.pool import Pool


@documents.record
class Share:
    """A job, or a pair that shares accelerators, and its fraction of time on one type of them.

    ``placement`` is ``consolidated`` or ``spread`` where that counts, ``count`` how many of them
    at once of a job that may run on several numbers.
    """

    jobs: tuple[str, ...]
    accelerator: str
    share: float
    placement: Literal["consolidated", "spread"] | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        if len(self.jobs) not in (1, 2):
            raise InputError(f"a share is of one job or a pair, got {len(self.jobs)} jobs")
        if not 0 <= self.share <= 1:
            raise InputError(
                f"share of {' with '.join(self.jobs)}: {self.share!r} is not in [0, 1]"
            )


@documents.record
class AllocationPlan(Envelope):
    """Fractions of time of jobs on accelerators, with the policy and its bound.

    ``digest`` identifies the jobs and the pool.
    """

    policy: str
    shares: tuple[Share, ...]
    space_sharing: bool = False
    placement: bool = False
    objective: float | None = None
    bound: float | None = None
    proved_by: str | None = None
    notes: tuple[str, ...] = ()
    format: Literal["stagewright-allocation"] = "stagewright-allocation"
    version: Literal[1] = 1


def digest_of(workload: Workload, pool: Pool) -> str:
    """Identifies the problem of an allocation."""
    text = documents.to_json(workload) + documents.to_json(pool)
    return hashlib.sha256(text.encode()).hexdigest()


def shares_of(problem: AllocationProblem, allocation: Allocation) -> tuple[Share, ...]:
    """``allocation`` by names of jobs and accelerators."""
    workers = problem.table.workers
    names = problem.table.pool.names
    found = []
    order = np.lexsort((allocation.partner, allocation.worker, allocation.job))
    for job, partner, worker, share in zip(
        allocation.job[order].tolist(),
        allocation.partner[order].tolist(),
        allocation.worker[order].tolist(),
        allocation.share[order].tolist(),
        strict=True,
    ):
        jobs = (job,) if partner < 0 else (job, partner)
        kind = workers[worker]
        found.append(
            Share(
                tuple(problem.names[one] for one in jobs),
                names[kind.accelerator],
                min(1.0, share),
                kind.placement,
                kind.count,
            )
        )
    return tuple(found)


def allocation_of(plan: AllocationPlan, problem: AllocationProblem) -> Allocation:
    """The plan's shares as arrays, checked against ``problem``.

    Raises InputError if the plan speaks of another job or accelerator, or breaks a rule.
    """
    index = {name: number for number, name in enumerate(problem.names)}
    names = problem.table.pool.names
    columns = {
        (names[kind.accelerator], kind.placement, kind.count): column
        for column, kind in enumerate(problem.table.workers)
    }
    rows = []
    for number, one in enumerate(plan.shares):
        place = f"shares[{number}]: "
        for job in one.jobs:
            if job not in index:
                raise InputError(f"{place}there is no job {job!r}")
        worker = columns.get((one.accelerator, one.placement, one.count))
        if worker is None:
            known = ", ".join(kind.name for kind in problem.table.workers)
            count = None if one.count is None else f"x{one.count}"
            spelled = " ".join(filter(None, (one.accelerator, one.placement, count)))
            raise InputError(f"{place}no worker type {spelled!r}; there are {known}")
        jobs = sorted((index[job] for job in one.jobs), key=lambda job: problem.kind[job])
        rows.append((jobs[0], jobs[1] if len(jobs) > 1 else -1, worker, one.share))
    first, partner, column = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(3))
    shares = np.array([row[3] for row in rows], dtype=float)
    allocation = Allocation(first, partner, column, shares)
    try:
        check(problem, allocation)
    except InvalidPlan as error:
        raise InputError(f"the allocation is not valid: {error}") from None
    return allocation


def load_allocation(path: str | os.PathLike[str]) -> AllocationPlan:
    """Read an allocation file; see :func:`documents.read` for the errors."""
    return documents.read(AllocationPlan, path)


def save_allocation(plan: AllocationPlan, path: str | os.PathLike[str]) -> None:
    """Write ``plan`` to ``path`` atomically."""
    documents.write(AllocationPlan, plan, path)
