"""The report of a cluster run: outcomes, placements, and planned and received shares."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stagewright.executor.clusters.job_store import JobRecord
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.workloads.jobs import Job


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The final state of a job.

    ``waiting``: the cluster lacks the accelerators for it, or the run was stopped; the folder can
    be used again.
    ``completion_seconds`` are since its arrival. ``error`` is the last one since its last commit.
    """

    name: str
    state: Literal["done", "failed", "waiting"]
    steps: int
    completion_seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """Jobs on accelerators (numbers within their type) in a round."""

    jobs: tuple[str, ...]
    worker: str
    accelerators: tuple[int, ...]
    renewed: bool


@dataclass(frozen=True, slots=True)
class Share:
    """A job's planned and received fraction of its time in the cluster, on a worker type.

    Alone there it was predicted to make so many steps per second, and made ``steps_per_second`` by
    the scheduler's clock; None where no step was timed.
    """

    job: str
    worker: str
    target: float
    measured: float
    predicted_steps_per_second: float
    steps_per_second: float | None = None


@documents.record
class ClusterReport:
    """Outcomes of all jobs; rounds and shares of this scheduler."""

    jobs: tuple[JobOutcome, ...]
    rounds: tuple[tuple[Placed, ...], ...]
    shares: tuple[Share, ...]
    format: Literal["stagewright-cluster-report"] = "stagewright-cluster-report"
    version: Literal[1] = 1


class Ledger:
    """Seconds that jobs received on worker types, and the seconds of their targets."""

    def __init__(self, jobs: Sequence[str], workers: Sequence[str]) -> None:
        self.jobs = jobs
        self.workers = workers
        self.rounds: list[tuple[Placed, ...]] = []
        shape = (len(jobs), len(workers))
        self._promised, self._had, self._there = np.zeros(shape), np.zeros(shape), np.zeros(shape)

    def note(
        self,
        placed: Iterable[Placed],
        had: Iterable[tuple[int, int, float]],
        target: Floats,
        there: Sequence[int],
        seconds: float,
    ) -> None:
        """Record a round of ``seconds``, in which jobs ``had`` (job, worker, seconds).

        ``target``, shape (jobs, workers), is the target of the round; ``there`` are its jobs.
        """
        self.rounds.append(tuple(placed))
        for job, worker, of_job in had:
            self._had[job, worker] += of_job
        self._promised += target * seconds
        self._there[list(there)] += seconds

    def shares(self, predicted: Floats, rates: Floats) -> tuple[Share, ...]:
        """The shares of all jobs and worker types that were planned or received.

        ``predicted`` and measured ``rates``, nan where there is none: (jobs, workers).
        """
        seconds = np.maximum(self._there, 1e-9)
        target, measured = self._promised / seconds, self._had / seconds
        return tuple(
            Share(
                self.jobs[job],
                self.workers[worker],
                float(target[job, worker]),
                float(measured[job, worker]),
                float(predicted[job, worker]),
                None if np.isnan(rates[job, worker]) else float(rates[job, worker]),
            )
            for job, worker in zip(*np.nonzero(target + measured), strict=True)
        )


def outcome(job: Job, record: JobRecord) -> JobOutcome:
    """The final state of ``job``, from its record in the store."""
    finished = record.finished_seconds
    return JobOutcome(
        job.name,
        "waiting" if record.state == "active" else record.state,
        record.committed,
        None if finished is None else finished - job.arrival_seconds,
        record.error,
    )
