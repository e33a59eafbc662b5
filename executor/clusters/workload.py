"""The jobs that a cluster trains, and their remaining steps."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stagewright.executor.clusters.leases import Lease
from stagewright.formulations.clusters.allocation import (
    AllocationProblem,
    problem_of_jobs,
)
from stagewright.formulations.clusters.rates import RateTable
from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount
from stagewright.graphs.workloads.jobs import Job

TrainingFunction = Callable[[Lease], object]


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A job and the program that trains it; the program runs once per lease and rank."""

    job: Job
    program: TrainingFunction


def require_runnable(jobs: Sequence[ClusterJob]) -> None:
    """Refuse jobs that cannot run.

    Raises
    ------
    InputError
        In one line that names the job.
    """
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

    Raises
    ------
    InputError
        In one line that begins with the setting.
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
