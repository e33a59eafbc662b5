"""The scheduler's side of leases: grants of steps, and commits of checkpoints.

The durable part is :class:`JobStore`; grants are lost with the scheduler. All times are of the
server's clock; leases are granted in steps, so that the clocks of workers do not matter.
"""

import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from stagewright.executor.clusters.job_store import JobRecord, JobStore
from stagewright.executor.clusters.leases import Grant, JobLeaseLostError, partial_checkpoint
from stagewright.graphs.documents import documents

_CONTACT = 0.75  # of a round: from then on it must be known whether a lease is renewed
AHEAD = (
    0.5  # fraction of the time until then that a grant covers: a job may slow down to half its rate
)
START_SECONDS = 300.0  # maximum time until the iterator of a process first asks
_MIN_STEP_SECONDS = 1e-6  # lower limit of a measured step; clocks may say 0
KEPT = 2  # number of committed checkpoints kept of a job


@dataclass(slots=True)
class _ActiveLease:
    """An active lease: its grants so far, and which ranks have saved after which step."""

    epoch: int
    ranks: int
    first: int
    since: float = field(
        default_factory=lambda: time.monotonic()
    )  # its last rank began, or it was started
    begun: set[int] = field(default_factory=set)
    grants: list[Grant] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)
    granted: float = 0.0  # when the last grant was
    seconds_per_step: float = 0.0
    has_asked: bool = False  # since the round was decided

    @property
    def is_ending(self) -> bool:
        return bool(self.grants) and self.grants[-1].is_last

    def measure(self) -> tuple[int, float]:
        """Take the time of a step from those of the last grant, which are done now: (n, seconds).

        By the server's clock, not by what a job says of itself.
        """
        now, steps, seconds = time.monotonic(), 0, 0.0
        if self.grants:
            before = self.grants[-2].step if len(self.grants) > 1 else self.first
            steps, seconds = self.grants[-1].step - before, now - self.granted
            self.seconds_per_step = max(seconds / max(1, steps), _MIN_STEP_SECONDS)
        self.granted = now
        return steps, seconds

    @property
    def may_start_until(self) -> float:
        return self.since + (START_SECONDS if len(self.begun) < self.ranks else 0.0)


class LeaseServer:
    """Leases of the jobs in ``folder``, in rounds of ``round_seconds``.

    A job has failed with more than ``retries`` failures since its last commit. ``database`` is
    where the store is; see :class:`JobStore`.
    """

    def __init__(
        self, folder: Path, round_seconds: float, retries: int, database: str | None = None
    ) -> None:
        self.folder = folder
        self.database = database
        self.round_seconds = round_seconds
        self.retries = retries
        self.store: JobStore
        self._held: dict[str, _ActiveLease] = {}
        self._measured: dict[tuple[str, int], tuple[int, float]] = {}
        self._end = 0.0
        self._renewed: frozenset[str] | None = None  # None until the next round is decided
        self._is_stopping = False

    # The scheduler's calls.

    def open(self, steps: dict[str, int]) -> tuple[JobRecord, ...]:
        """Take over the folder; returns the state of the jobs, given ``steps`` by name."""
        self.store = JobStore(self.folder, self.database)
        for name in steps:
            _folder_of(self.folder, name).mkdir(exist_ok=True)
        return tuple(self.store.add(name, count) for name, count in steps.items())

    def seconds(self) -> float:
        """Seconds since the start of the folder's first scheduler."""
        return self.store.seconds()

    def begin_round(self) -> None:
        """Begin a round: leases end when it ends, unless they are renewed."""
        self._end = time.monotonic() + self.round_seconds
        self._renewed = None

    def decide(self, names: Iterable[str]) -> frozenset[str]:
        """Renew the leases of these jobs; returns those whose lease was not already ending."""
        for held in self._held.values():
            held.has_asked = False
        self._renewed = frozenset(
            name for name in names if name in self._held and not self._held[name].is_ending
        )
        return self._renewed

    def stop(self) -> None:
        """Renew no lease any more; each ends with a checkpoint after the steps already granted."""
        self.decide(())
        self._is_stopping = True

    def overstays(self) -> dict[str, float]:
        """Seconds past the end of a lease, of jobs that were not renewed or have not asked.

        Processes that have not asked yet may still be starting.
        """
        now, renewed = time.monotonic(), self._renewed or frozenset()
        return {
            name: now - max(self._end, held.may_start_until)
            for name, held in self._held.items()
            if name not in renewed or not held.has_asked or held.is_ending
        }

    def start(self, name: str, ranks: int) -> tuple[JobRecord, Path]:
        """Start a new epoch of the job; returns its state and folder."""
        record = self.store.begin(name)
        self._held[name] = _ActiveLease(record.epoch, ranks, record.committed)
        return record, _folder_of(self.folder, name)

    def ended(self, name: str, epoch: int) -> JobRecord:
        """Record that the lease's processes have ended; without a commit the start has failed."""
        record = self.store.job(name)
        if epoch == self.store.last_commit(name):
            self._held.pop(name, None)
            return record
        return self.fail(name, epoch, "the program returned before its lease was over", True)

    def fail(self, name: str, epoch: int, error: str, is_counted: bool) -> JobRecord:
        """Record that the start of ``epoch`` has failed; count it if it is the job's fault."""
        self._held.pop(name, None)
        return self.store.fail(name, epoch, error, self.retries if is_counted else None)

    def progress(self) -> dict[str, tuple[int, float]]:
        """Lower bound of the steps done, and last measured steps per second, of leased jobs."""
        return {
            name: (held.grants[-2].step, 1 / held.seconds_per_step)
            for name, held in self._held.items()
            if len(held.grants) > 1
        }

    def measured(self) -> dict[tuple[str, int], tuple[int, float]]:
        """By job and epoch the steps that were timed, and the seconds that they took."""
        return self._measured

    # The iterator's calls.

    def grant(self, job: str, epoch: int, rank: int, number: int) -> Grant:
        """See :meth:`stagewright.executor.clusters.leases.Scheduler.grant`."""
        record, held = self._require(job, epoch, rank)
        if not 0 <= number <= len(held.grants):
            raise JobLeaseLostError(
                f"job {job!r}: rank {rank} asked for grant {number}, has had {len(held.grants)}"
            )
        held.has_asked = True
        if rank not in held.begun:
            held.begun.add(rank)
            held.since = time.monotonic()
        if number == len(held.grants):
            before, taken = self._measured.get((job, epoch), (0, 0.0)), held.measure()
            self._measured[job, epoch] = before[0] + taken[0], before[1] + taken[1]
            held.grants.append(self._next(record, held))
        return held.grants[number]

    def _next(self, record: JobRecord, held: _ActiveLease) -> Grant:
        """The grant for the first rank that asks, valid for all: beyond every rank's step."""
        goes_on = self._renewed is not None and record.name in self._renewed
        end = self._end + (self.round_seconds if goes_on else 0.0)
        remaining = 0.0 if self._is_stopping else end - time.monotonic()
        until_contact = remaining - (1 - _CONTACT) * self.round_seconds
        is_last = remaining <= 0 or (until_contact <= 0 and self._renewed is not None)
        if not held.grants:
            steps = 1  # a lease runs at least one step, which measures its time
        elif is_last:
            steps = max(0, int(remaining / held.seconds_per_step))
        else:
            steps = max(1, int(AHEAD * until_contact / held.seconds_per_step))
        done = held.grants[-1].step if held.grants else held.first
        step = min(done + steps, record.steps)
        return Grant(step, is_last or step == record.steps)

    def saved(self, job: str, epoch: int, rank: int, step: int) -> None:
        """See :meth:`stagewright.executor.clusters.leases.Scheduler.saved`."""
        _, held = self._require(job, epoch, rank)
        if not held.is_ending or step != held.grants[-1].step:
            raise JobLeaseLostError(
                f"job {job!r}: rank {rank} saved step {step}, not the end of its lease"
            )
        held.saved[rank] = step
        if len(held.saved) == held.ranks:
            self._commit(job, held, step)

    def _commit(self, job: str, held: _ActiveLease, step: int) -> None:
        folder = _folder_of(self.folder, job)
        path = folder / f"epoch-{held.epoch:08d}-step-{step:010d}"
        partial_checkpoint(folder, held.epoch).rename(path)
        documents.flush(folder)
        self.store.commit(job, held.epoch, step, path)
        _clean(folder, held.epoch)

    def _require(self, job: str, epoch: int, rank: int) -> tuple[JobRecord, _ActiveLease]:
        record = self.store.require_current(job, epoch)
        held = self._held.get(job)
        if held is None or held.epoch != epoch or len(held.saved) == held.ranks:
            raise JobLeaseLostError(f"job {job!r}: there is no active lease of epoch {epoch}")
        if not 0 <= rank < held.ranks:
            raise JobLeaseLostError(f"job {job!r}: rank {rank} is not one of {held.ranks}")
        return record, held


def _folder_of(folder: Path, job: str) -> Path:
    return folder / f"job-{quote(job, safe='')}"


def _clean(folder: Path, epoch: int) -> None:
    """Remove old committed checkpoints, and unfinished ones of older epochs."""
    complete = sorted(folder.glob("epoch-*-step-*"))
    partial = [path for path in folder.glob(".epoch-*") if path.name < f".epoch-{epoch:08d}"]
    for path in (*complete[:-KEPT], *partial):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
