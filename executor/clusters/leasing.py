"""The jobs that have processes: their start, renewal, end and failure under leases."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stagewright.executor.clusters.job_store import JobRecord
from stagewright.executor.clusters.leases import Lease
from stagewright.executor.clusters.rates import (
    CurrentRound,
    LeasedJob,
    MeasuredRate,
    measurements,
    place_of,
)
from stagewright.executor.clusters.ray_ranks import Accelerators, RemoteScheduler, call, one_line
from stagewright.executor.clusters.rounds import Assignment
from stagewright.formulations.clusters.rates import RateTable
from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.graphs.documents.arrays import Floats


class Leasing:
    """Processes of jobs on Ray.

    ``server``: the actor that decides on leases and stores the jobs. ``programs``: per job, the
    function that its ranks call, pickled. ``records``: per job, its stored record; kept up to date
    here. ``grace_seconds``: how long a process may exceed its lease before it is killed.
    """

    def __init__(
        self,
        ray: Any,
        accelerators: Accelerators,
        server: Any,
        table: RateTable,
        programs: Sequence[bytes],
        records: list[JobRecord],
        grace_seconds: float,
    ) -> None:
        self.ray, self.accelerators, self.server = ray, accelerators, server
        self.workers, self.pool = table.workers, table.pool
        self.programs, self.records, self.grace_seconds = programs, records, grace_seconds
        self.leased: dict[int, LeasedJob] = {}
        self.alone: dict[tuple[str, int], tuple[int, int]] = {}  # job and worker type of an epoch
        self.round: CurrentRound

    def begin_round(self, current: CurrentRound, assigned: Sequence[Assignment]) -> None:
        """Start the jobs of a round that have no processes yet."""
        self.round = current
        call(self.server, "begin_round")
        for assignment in assigned:
            for job in assignment.jobs:
                if job not in self.leased and self.records[job].state == "active":
                    self.leased[job] = self._start(job, assignment)

    def _start(self, job: int, assignment: Assignment) -> LeasedJob:
        """Record a new epoch durably, then start its ranks."""
        ranks = len(assignment.accelerators)
        record, folder = call(self.server, "start", self.records[job].name, ranks)
        self.records[job] = record
        number = self.workers[assignment.worker].accelerator
        name = self.pool.accelerators[number].name
        out = LeasedJob(record.epoch, [], [], *place_of(assignment))
        if out.sharing == 1:
            self.alone[record.name, record.epoch] = job, out.worker
        for rank, accelerator in enumerate(assignment.accelerators):
            lease = Lease(
                record.name,
                record.epoch,
                rank,
                ranks,
                name,
                record.steps,
                record.committed,
                None if record.checkpoint is None else Path(record.checkpoint),
                folder,
                RemoteScheduler(self.server),
            )
            node = self.accelerators.node(number, accelerator)
            out.nodes.append(node)
            out.refs.append(
                self.accelerators.run(node, name, 1 / out.sharing, self.programs[job], lease)
            )
        return out

    def renew(self, following: Sequence[Assignment]) -> None:
        """Renew jobs that stay on the same accelerators, shared by as many jobs."""
        places = {job: place_of(assignment) for assignment in following for job in assignment.jobs}
        names = [
            self.records[job].name
            for job, out in self.leased.items()
            if places.get(job) == out.place
        ]
        call(self.server, "decide", names)

    def stop(self) -> None:
        """End all leases early, each with a checkpoint."""
        call(self.server, "stop")

    def watch(self, until_seconds: float, stop: StopToken | None = None) -> None:
        """Handle ended processes until this time of the round, or until no lease is active.

        ``stop`` ends it early.
        """
        while self.leased and self.round.seconds < until_seconds and not is_stopped(stop):
            self._settle(min(until_seconds - self.round.seconds, 1.0))

    def await_ends(self, pause_seconds: float) -> None:
        """Wait for processes whose lease has ended; kill those that exceed it."""
        while self.leased and (overstays := call(self.server, "overstays")):
            for job in list(self.leased):
                if overstays.get(self.records[job].name, -math.inf) > self.grace_seconds:
                    self._fail(
                        job, f"did not end within {self.grace_seconds:g} s of the end of its lease"
                    )
            if self.leased:
                self._settle(pause_seconds)

    def _settle(self, timeout_seconds: float) -> None:
        """Wait for processes to end, and handle every process that has ended."""
        refs = [ref for out in self.leased.values() for ref in out.refs]
        self.ray.wait(refs, timeout=max(timeout_seconds, 0.0))
        ready = set(self.ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        for job, out in list(self.leased.items()):
            for ref in [ref for ref in out.refs if ref in ready]:
                out.refs.remove(ref)
                error, node_died = self._error(ref)
                if error is not None:
                    self._fail(job, error, node_died)
                    break
            else:
                if not out.refs:
                    self._end(job, call(self.server, "ended", self.records[job].name, out.epoch))

    def _error(self, ref: Any) -> tuple[str | None, bool]:
        """The rank's error in one line or None, and whether its node has died.

        The list of nodes shows a death only after some health checks.
        """
        try:
            return self.ray.get(ref), False
        except self.ray.exceptions.RayError as error:
            return one_line(error), isinstance(error, self.ray.exceptions.NodeDiedError)

    def _fail(self, job: int, error: str, node_died: bool = False) -> None:
        """Fence the epoch, then end its processes; a node's death does not count as a failure."""
        out = self.leased[job]
        is_counted = not node_died and self.accelerators.are_alive(out.nodes)
        name = self.records[job].name
        record = call(self.server, "fail", name, out.epoch, error, is_counted)
        number = self.workers[out.worker].accelerator
        self.accelerators.kill(out.refs, number, out.accelerators)
        self._end(job, record)

    def _end(self, job: int, record: JobRecord) -> None:
        del self.leased[job]
        self.records[job] = record
        self.round.ran[job] = self.round.seconds

    def seconds(self, job: int, round_seconds: float) -> float:
        """Seconds of the round that the job ran; the full round if its lease continues."""
        return round_seconds if job in self.leased else self.round.ran.get(job, 0.0)

    def measured(
        self, progress: Mapping[str, tuple[int, float]], kinds: Sequence[int]
    ) -> list[MeasuredRate]:
        """The rates of jobs with processes; ``kinds`` of all jobs."""
        rates = {
            job: progress[self.records[job].name][1]
            for job in self.leased
            if self.records[job].name in progress
        }
        return measurements(self.leased, rates, kinds.__getitem__)

    def rates(self, shape: tuple[int, int]) -> Floats:
        """Mean steps per second of jobs alone on a worker type, nan where none was timed.

        ``shape`` is (jobs, workers).
        """
        total = np.zeros((*shape, 2))
        for epoch, timed in call(self.server, "measured").items():
            if epoch in self.alone:
                total[self.alone[epoch]] += timed
        steps, seconds = total[..., 0], total[..., 1]
        rates: Floats = np.divide(steps, seconds, out=np.full(shape, np.nan), where=seconds > 0)
        return rates

    def close(self) -> None:
        """End all active leases."""
        for out in self.leased.values():
            self.accelerators.cancel(out.refs)
