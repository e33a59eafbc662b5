"""The result of a cluster simulation: jobs, rounds, allocations, and their statistics."""

import math
from dataclasses import dataclass

import numpy as np

from stagewright.executor.clusters.rates import RatePlace
from stagewright.executor.clusters.rounds import Assignment
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.workloads.jobs import Job
from stagewright.graphs.workloads.pool import Pool

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """The result of a job; ``completion_seconds`` is None if the simulation ended before.

    ``isolated_seconds`` is the time that its steps take on 1/n of the cluster, where n is the
    number of jobs at each time.
    """

    job: Job
    completion_seconds: float | None
    isolated_seconds: float

    @property
    def duration_seconds(self) -> float:
        """Job completion time: from arrival to completion; NaN if not complete."""
        if self.completion_seconds is None:
            return math.nan
        return self.completion_seconds - self.job.arrival_seconds

    @property
    def fairness(self) -> float:
        """Finish-time fairness rho: completion time over the time alone on 1/n of the cluster."""
        return self.duration_seconds / self.isolated_seconds if self.isolated_seconds else math.nan

    @property
    def violates_slo(self) -> bool:
        """Whether the job has an SLO and exceeded it."""
        slo = self.job.slo_seconds
        return slo is not None and not self.duration_seconds <= slo


@dataclass(frozen=True, slots=True)
class TimelineRound:
    """The assignments of a round, and the mean number of busy accelerators of each type.

    ``assignments`` is empty if the simulation did not keep them.
    """

    start_seconds: float
    end_seconds: float
    active_jobs: int
    busy: tuple[float, ...]
    assignments: tuple[Assignment, ...] = ()


@dataclass(frozen=True, slots=True)
class Reset:
    """A new allocation, and the deviation of the rounds from the previous one."""

    seconds: float
    jobs: int
    shortfall: float
    mean_deviation: float


@dataclass(frozen=True, slots=True, eq=False)
class ClusterTimeline:
    """The record of a simulation: ``jobs`` in order of arrival, ``busy_seconds`` by type.

    ``accelerator`` is each worker type's accelerator, by its position in the pool. ``interrupted``:
    a stop token ended the simulation before the jobs of its window were complete. ``corrected``:
    rates that the policy took for others until a job ran there, in this order.
    """

    pool: Pool
    accelerator: tuple[int, ...]
    jobs: tuple[SimulatedJob, ...]
    rounds: tuple[TimelineRound, ...]
    resets: tuple[Reset, ...]
    seconds: float
    busy_seconds: tuple[float, ...]
    dollars: float | None
    renewals: int
    renewable: int
    interrupted: bool = False
    corrected: tuple[RatePlace, ...] = ()

    def durations(self, window: range | None = None, weight: float | None = None) -> Floats:
        """Completion times in seconds, of the jobs numbered in ``window`` and of ``weight``."""
        chosen = self.jobs if window is None else self.jobs[window.start : window.stop]
        return np.array(
            [
                outcome.duration_seconds
                for outcome in chosen
                if outcome.completion_seconds is not None
                and (weight is None or outcome.job.weight == weight)
            ]
        )

    def mean_jct_seconds(self, window: range | None = None, weight: float | None = None) -> float:
        """Average job completion time, NaN if no job completed."""
        found = self.durations(window, weight)
        return float(found.mean()) if found.size else math.nan

    @property
    def makespan_seconds(self) -> float:
        """Completion time of the last job."""
        return max((outcome.completion_seconds or 0.0 for outcome in self.jobs), default=0.0)

    def fairness(self, window: range | None = None) -> Floats:
        """Finish-time fairness of the completed jobs."""
        chosen = self.jobs if window is None else self.jobs[window.start : window.stop]
        return np.array([o.fairness for o in chosen if o.completion_seconds is not None])

    @property
    def slo_violations(self) -> int:
        """Number of jobs that exceeded their SLO, or have one and did not complete."""
        return sum(outcome.violates_slo for outcome in self.jobs)

    @property
    def utilisation(self) -> float:
        """Fraction of the accelerators' time in use."""
        total = sum(accelerator.count for accelerator in self.pool.accelerators) * self.seconds
        return sum(self.busy_seconds) / total if total else 0.0

    @property
    def renewal_rate(self) -> float:
        """Fraction of renewed leases among those whose job had steps left."""
        return self.renewals / self.renewable if self.renewable else 0.0
