"""Settings and results of a cluster simulation: jobs, rounds, allocations, statistics."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stagewright.executor.clusters.rates import RatePlace
from stagewright.executor.clusters.rounds import Assignment
from stagewright.formulations.clusters.rates import RateTable, rate_table
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Job, Kind, Throughputs
from stagewright.graphs.workloads.pool import Pool

MOST_ROUNDS = 1_000_000  # eleven years of rounds of six minutes


@dataclass(frozen=True, slots=True)
class ClusterRules:
    """Settings of a simulated cluster.

    ``round_seconds``: length of a round. ``reset_seconds``: least time between two allocations.
    ``fill``: give accelerators that no share claims to idle jobs; see ``Mechanism``.
    ``shuffle_seed``: fill the types of accelerators in random order, for policies that do not
    distinguish types; the public code draws it from its seed + 5. ``space_sharing``, ``placement``:
    whether jobs may share accelerators, and whether servers count. ``ideal``: no rounds: every job
    receives exactly its share at all times (figure 5.15b).
    """

    round_seconds: float = 360.0
    reset_seconds: float = 1920.0
    fill: bool = True
    shuffle_seed: int | None = None
    space_sharing: bool = False
    placement: bool = False
    ideal: bool = False

    def __post_init__(self) -> None:
        for name in ("round_seconds", "reset_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"{name} must be more than zero, got {value!r}")

    def require_one_more(self, rounds: int) -> None:
        """Refuse a simulation that has no end in sight after this many rounds."""
        if rounds >= MOST_ROUNDS:
            raise InputError(
                f"the jobs need more than {MOST_ROUNDS:,} rounds of {self.round_seconds:g} s: "
                "choose longer rounds"
            )


def table_of(
    throughputs: Throughputs, pool: Pool, rules: ClusterRules, elastic: Iterable[Kind] = ()
) -> RateTable:
    """Rates of every kind that can run in the pool, since jobs are not known in advance.

    ``elastic``: the kinds of jobs that choose among counts.
    """
    known: dict[tuple[str, int], set[str]] = {}
    runs = set()
    counts = {accelerator.name: accelerator.count for accelerator in pool.accelerators}
    for rate in throughputs.alone:
        known.setdefault((rate.model, rate.scale), set()).add(rate.accelerator)
        if rate.steps_per_second > 0 and rate.scale <= counts.get(rate.accelerator, 0):
            runs.add((rate.model, rate.scale))
    kinds: list[Kind] = [
        kind for kind, names in known.items() if kind in runs and names >= set(pool.names)
    ]
    every = [*kinds, *elastic]
    return rate_table(
        throughputs, pool, every, space_sharing=rules.space_sharing, placement=rules.placement
    )


Quota = tuple[float, float, float]
"""Steps per second; steps in a round, and the seconds that they take."""


def quota_of(rate: float, seconds: float) -> Quota:
    """Whole steps within ``seconds``; a step that is longer continues in the next round."""
    most = rate * seconds
    steps = float(int(most)) or most
    return rate, steps, steps / rate if rate else 0.0


@dataclass(slots=True)
class ActiveJob:
    """A job in the cluster.

    ``since_reset`` are steps run since the last allocation, ``restarting`` the seconds until its
    next step on the accelerators that it has.
    """

    number: int
    job: Job
    kind: int
    left: float
    isolated_seconds: float = 0.0
    since_reset: float = 0.0
    restarting: float = 0.0

    def plan(self, quota: Quota, renewed: bool, round_seconds: float) -> tuple[float, float]:
        """Steps in a round, and the seconds of the restart and of them."""
        if not renewed:
            self.restarting = self.job.move_seconds
        waited = min(self.restarting, round_seconds)
        self.restarting -= waited
        if waited == round_seconds:
            return 0.0, waited
        rate, steps, seconds = quota_of(quota[0], round_seconds - waited) if waited else quota
        if steps > self.left:
            steps, seconds = self.left, self.left / rate
        return steps, waited + seconds


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
