"""Run the jobs of a workload in rounds, as processes on Ray.

Narayanan, PhD thesis (2021), sections 5.5 and 5.6. :class:`Mechanism` places the jobs of the next
round; Ray starts their processes; leases (:mod:`leases`) end them at the end of a round, with a
checkpoint, unless they are renewed. Steps are never lost after a commit and never counted twice:
each start has a new epoch, recorded before it, and only the newest can commit.

Accelerators are custom resources of Ray with the pool's names: start the nodes of a cluster with
``ray start --resources='{"v100": 4}'``. Without a cluster, a local Ray gets those of the pool.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stagewright.executor.clusters.job_store import JobRecord
from stagewright.executor.clusters.lease_server import LeaseServer
from stagewright.executor.clusters.leasing import Leasing
from stagewright.executor.clusters.rates import (
    ClusterJob,
    CurrentRound,
    has_moved,
    measured,
    problem_after,
    require_runnable,
    require_settings,
    surviving,
)
from stagewright.executor.clusters.ray_ranks import Accelerators, call, connected
from stagewright.executor.clusters.report import ClusterReport, Ledger, Placed, outcome
from stagewright.executor.clusters.rounds import Assignment, Mechanism
from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, check
from stagewright.formulations.clusters.rates import RateTable, rate_table
from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.graphs.workloads.jobs import Throughputs
from stagewright.graphs.workloads.pool import Pool

Allocate = Callable[[AllocationProblem], Allocation]


def run_cluster(
    jobs: Sequence[ClusterJob],
    throughputs: Throughputs,
    pool: Pool,
    allocate: Allocate,
    *,
    folder: str | os.PathLike[str],
    round_seconds: float = 360.0,
    grace_seconds: float = 60.0,
    patience_seconds: float = 600.0,
    retries: int = 3,
    feedback: float = 0.0,
    space_sharing: bool = False,
    placement: bool = False,
    address: str | None = None,
    database: str | None = None,
    stop: StopToken | None = None,
) -> ClusterReport:
    """Train all jobs in rounds until each is done, has failed, or cannot get accelerators.

    Raises InputError if Ray is missing or lacks accelerators, a job's steps are not a whole number,
    throughputs are missing, or the folder belongs to another workload. Raises SupersededError if
    another scheduler has taken over the folder.

    Parameters
    ----------
    allocate
        The policy, called whenever jobs arrive or end, nodes die or return, or rates change.
    folder
        Folder of checkpoints and of the job store, shared by all nodes. Jobs that it already
        contains continue from their checkpoints.
    round_seconds
        Length of a round; several steps of every job should fit.
    grace_seconds
        How long a process may exceed its lease before it is killed.
    patience_seconds
        How long to wait for accelerators when no job can run on the remaining ones.
    retries
        How often a job may fail between two commits before it is abandoned.
    feedback
        Weight of a newly measured rate against the known one; 0 uses ``throughputs`` unchanged.
    address
        Address of a Ray cluster; by default Ray runs on this machine, started if necessary.
    database
        An SQLAlchemy URL of the job store (default: a SQLite file in ``folder``).
    stop
        Once it is set, no lease is renewed: processes save checkpoints and end, and the jobs that
        are not done are ``waiting``. The same folder continues them.
    """
    require_runnable(jobs)
    require_settings(round_seconds, grace_seconds, patience_seconds, feedback)
    table = rate_table(
        throughputs,
        pool,
        [each.job.kind for each in jobs],
        space_sharing=space_sharing,
        placement=placement,
    )
    with connected({each.name: each.count for each in pool.accelerators}, address) as ray:
        run = _Scheduler(
            ray,
            jobs,
            table,
            allocate,
            round_seconds=round_seconds,
            grace_seconds=grace_seconds,
            patience_seconds=patience_seconds,
            feedback=feedback,
            stop=stop,
        )
        try:
            run.open(Path(folder).resolve(), retries, database)
            run.loop()
            return run.report()
        finally:
            run.close()


class _Scheduler:
    """The state of a running scheduler, from taking over the folder to the report."""

    def __init__(
        self,
        ray: Any,
        jobs: Sequence[ClusterJob],
        table: RateTable,
        allocate: Allocate,
        *,
        round_seconds: float,
        grace_seconds: float,
        patience_seconds: float,
        feedback: float,
        stop: StopToken | None,
    ) -> None:
        self.ray = ray
        self.jobs = [each.job for each in jobs]
        self.programs = [ray.cloudpickle.dumps(each.program) for each in jobs]
        self.kinds = [table.index[job.kind] for job in self.jobs]
        self.table = table  # with the rates as measured
        self.predicted = table.alone[self.kinds]  # of jobs, (jobs, workers)
        self.allocate = allocate
        self.round_seconds = round_seconds
        self.grace_seconds = grace_seconds
        self.patience_seconds = patience_seconds
        self.feedback = feedback
        self.stop = stop
        self.mechanism = Mechanism(table, round_seconds)
        self.accelerators = Accelerators(ray, table.pool)
        self.ledger = Ledger(
            [job.name for job in self.jobs], [worker.name for worker in table.workers]
        )
        self.planned: tuple[object, ...] = ()
        self.planned_with = table
        self.target = np.zeros((len(self.jobs), len(table.workers)))
        self.there: list[int] = []
        self.records: list[JobRecord] = []
        self.server: Any = None
        self.leasing: Leasing
        self.round: CurrentRound

    # Opening and closing.

    def open(self, folder: Path, retries: int, database: str | None) -> None:
        """Start the server on this node, take over the folder, and find the accelerators."""
        options = self.round_seconds, retries, database
        self.server = self.accelerators.start_here(LeaseServer, folder, *options)
        self.leasing = Leasing(
            self.ray,
            self.accelerators,
            self.server,
            self.table,
            self.programs,
            self.records,
            self.grace_seconds,
        )
        steps = {job.name: int(job.steps) for job in self.jobs}
        self.records += call(self.server, "open", steps)
        self.accelerators.require_all()

    def close(self) -> None:
        """End all active leases."""
        if self.server is not None:
            self.leasing.close()
            self.ray.kill(self.server)

    # Rounds.

    def loop(self) -> None:
        """Run rounds until no job can continue, or the run is stopped."""
        leasing = self.leasing
        current = self._first_round()
        while current:
            self.round = CurrentRound(self.target.copy(), self.there)
            leasing.begin_round(self.round, () if is_stopped(self.stop) else current)
            leasing.watch(self.round_seconds / 2, self.stop)
            self._account(current)
            following = self._renewed()
            leasing.watch(self.round_seconds)
            leasing.await_ends(pause_seconds=min(0.02 * self.round_seconds, 0.5))
            self._note(current)
            waiting = set(self._waiting())
            left = tuple(each for each in following if waiting.intersection(each.jobs))
            current = self._running(left) or self._first_round()

    def _renewed(self) -> tuple[Assignment, ...]:
        """The next round, whose leases are renewed where jobs stay; none once stopped."""
        if is_stopped(self.stop):
            self.leasing.stop()
            return ()
        following = self._schedule()
        self.leasing.renew(following)
        return following

    def _running(self, following: tuple[Assignment, ...]) -> tuple[Assignment, ...]:
        """The assignments to begin; once stopped, only jobs with renewed leases that still run."""
        if not is_stopped(self.stop):
            return following
        return tuple(each for each in following if self.leasing.leased.keys() & {*each.jobs})

    def _first_round(self) -> tuple[Assignment, ...]:
        """The first round after none; waits for jobs to arrive or nodes to return."""
        patient_until = time.monotonic() + self.patience_seconds
        while not is_stopped(self.stop) and (waiting := self._waiting()):
            found = self._schedule()
            if found:
                return found
            now = call(self.server, "seconds")
            arrival = min(self.jobs[job].arrival_seconds for job in waiting)
            if arrival > now:
                patient_until = time.monotonic() + arrival - now + self.patience_seconds
            elif time.monotonic() > patient_until:
                break
            time.sleep(min(1.0, self.round_seconds / 10))
        return ()

    def _waiting(self) -> list[int]:
        return [job for job, record in enumerate(self.records) if record.state == "active"]

    def _runnable(self, table: RateTable) -> list[int]:
        """Jobs that have arrived, have not ended, and can run on the remaining accelerators."""
        now = call(self.server, "seconds")
        return [
            job
            for job in self._waiting()
            if self.jobs[job].arrival_seconds <= now and table.alone[self.kinds[job]].any()
        ]

    def _schedule(self) -> tuple[Assignment, ...]:
        """The next round, with a new target if jobs, nodes or rates have changed."""
        in_order = self.accelerators.in_order()
        for number, (count, numbers) in enumerate(zip(self.table.counts, in_order, strict=True)):
            self.mechanism.restore(number, numbers)
            self.mechanism.lose(number, set(range(count)) - numbers)
        progress = call(self.server, "progress")
        if self.feedback:
            self._measure(progress)
        table = surviving(self.table, [len(each) for each in in_order])
        runnable = self._runnable(table)
        planned = (runnable, table.alone.any(axis=0).tolist(), table.pool)
        if planned != self.planned or has_moved(self.table, self.planned_with):
            self._plan(table, runnable, progress)
            self.planned, self.planned_with = planned, self.table
        return self.mechanism.schedule() if runnable else ()

    def _plan(
        self, table: RateTable, runnable: list[int], progress: Mapping[str, tuple[int, float]]
    ) -> None:
        self.target[:] = 0.0
        self.there = runnable
        if not runnable:
            return
        problem = self._problem(table, runnable, progress)
        allocation = self.allocate(problem)
        check(problem, allocation)
        self.mechanism.reset(problem, allocation, runnable)
        self.target[runnable] = allocation.dense(len(problem), len(table.workers))

    def _problem(
        self, table: RateTable, runnable: list[int], progress: Mapping[str, tuple[int, float]]
    ) -> AllocationProblem:
        done = [
            progress.get(self.jobs[job].name, (self.records[job].committed, 0.0))[0]
            for job in runnable
        ]
        jobs = [self.jobs[job] for job in runnable]
        problem = problem_after(jobs, table, np.array(done), call(self.server, "seconds"))
        return replace(
            problem, current=self.mechanism.held(runnable), lease_seconds=self.round_seconds
        )

    def _measure(self, progress: Mapping[str, tuple[int, float]]) -> None:
        """Move the table's rates towards those of the jobs with a lease."""
        found = self.leasing.measured(progress, self.kinds)
        self.table = measured(self.table, found, self.feedback)

    # Accounts.

    def _account(self, current: Sequence[Assignment]) -> None:
        for assignment in current:
            seconds = max(self.leasing.seconds(job, self.round_seconds) for job in assignment.jobs)
            self.mechanism.account(assignment, seconds)

    def _note(self, current: Sequence[Assignment]) -> None:
        """Record the round that ends."""
        seconds = self.round.seconds
        placed = [
            Placed(
                tuple(self.jobs[job].name for job in assignment.jobs),
                self.table.workers[assignment.worker].name,
                assignment.accelerators,
                assignment.renewed,
            )
            for assignment in current
        ]
        had = [
            (job, assignment.worker, self.leasing.seconds(job, seconds))
            for assignment in current
            for job in assignment.jobs
        ]
        self.ledger.note(placed, had, self.round.target, self.round.there, seconds)

    def report(self) -> ClusterReport:
        """The report on all jobs."""
        outcomes = map(outcome, self.jobs, self.records)
        shares = self.ledger.shares(self.predicted, self.leasing.rates(self.predicted.shape))
        return ClusterReport(tuple(outcomes), tuple(self.ledger.rounds), shares)
