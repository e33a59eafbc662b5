"""What must outlive the scheduler: jobs, their epochs and their committed checkpoints, in SQLite.

A job's epoch is raised here, durably, before the job starts anywhere; whoever holds an older epoch
can commit nothing. Each scheduler that opens the store begins a generation: it fences all epochs of
the one before, shuts it out, and gives jobs that had failed another chance.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from stagewright.executor.clusters.leases import LeaseLostError
from stagewright.graphs.documents.errors import InputError

FILE = "jobs.sqlite"
LOCK_SECONDS = 30.0  # how long a transaction waits for another's

_TABLES = """
CREATE TABLE IF NOT EXISTS scheduler (generation INTEGER NOT NULL, began REAL NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
    name TEXT PRIMARY KEY, steps INTEGER NOT NULL, epoch INTEGER NOT NULL DEFAULT 0,
    committed INTEGER NOT NULL DEFAULT 0, checkpoint TEXT, failures INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL DEFAULT 'active', error TEXT, finished_seconds REAL
);
CREATE TABLE IF NOT EXISTS commits (
    job TEXT NOT NULL, epoch INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
    PRIMARY KEY (job, epoch)
);
"""

State = Literal["active", "done", "failed"]


class SupersededError(LeaseLostError):
    """Another scheduler has taken over the folder: all leases of this one are over."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as it stands: ``committed`` of its steps are in ``checkpoint``.

    ``failures`` counts starts that failed since the last commit; ``finished_seconds`` is since the
    first scheduler began.
    """

    name: str
    steps: int
    epoch: int
    committed: int
    checkpoint: str | None
    failures: int
    state: State
    error: str | None
    finished_seconds: float | None


class JobStore:
    """The jobs of a folder, as one scheduler's generation sees them.

    Raises
    ------
    InputError
        If the folder cannot be made, or its store is none of ours.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                self.path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_TABLES)
            self._take_over()
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"{self.path}: no store of jobs can be kept here: {error}") from None

    def _take_over(self) -> None:
        with self._transaction():
            row = self._database.execute("SELECT generation, began FROM scheduler").fetchone()
            generation, began = row or (0, time.time())
            self.generation, self._began = int(generation) + 1, float(began)
            self._database.execute("DELETE FROM scheduler")
            self._database.execute(
                "INSERT INTO scheduler VALUES (?, ?)", (self.generation, self._began)
            )
            self._database.execute(
                "UPDATE jobs SET epoch = epoch + 1, failures = 0, "
                "state = CASE state WHEN 'failed' THEN 'active' ELSE state END"
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._transaction():
            self._require_newest()
            yield

    def _require_newest(self) -> None:
        (newest,) = self._database.execute("SELECT generation FROM scheduler").fetchone()
        if newest != self.generation:
            raise SupersededError(f"{self.path}: another scheduler has taken over")

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def seconds(self) -> float:
        """Wall-clock seconds since the folder's first scheduler began."""
        return time.time() - self._began

    def add(self, name: str, steps: int) -> JobRecord:
        """The job as it stands; a new one begins.

        Raises
        ------
        InputError
            If the store knows the job with another number of steps.
        """
        with self._writing():
            self._database.execute(
                "INSERT OR IGNORE INTO jobs (name, steps) VALUES (?, ?)", (name, steps)
            )
        record = self.job(name)
        if record.steps != steps:
            raise InputError(
                f"{self.path}: job {name!r} has {record.steps} steps there, here {steps}: name it "
                "otherwise, or use another folder"
            )
        return record

    def job(self, name: str) -> JobRecord:
        """The job as it stands."""
        found = self._database.execute(
            "SELECT name, steps, epoch, committed, checkpoint, failures, state, error, "
            "finished_seconds FROM jobs WHERE name = ?",
            (name,),
        ).fetchone()
        return JobRecord(*found)

    def begin(self, name: str) -> JobRecord:
        """The job with a new epoch, which no one has held."""
        with self._writing():
            self._database.execute("UPDATE jobs SET epoch = epoch + 1 WHERE name = ?", (name,))
        return self.job(name)

    def require_current(self, name: str, epoch: int) -> JobRecord:
        """The job, if ``epoch`` is its newest.

        Raises
        ------
        LeaseLostError
            If it is not, or the job is over, or another scheduler has taken over.
        """
        self._require_newest()
        record = self.job(name)
        if record.epoch != epoch or record.state != "active":
            raise LeaseLostError(
                f"job {name!r}: epoch {epoch} is over, the newest is {record.epoch} "
                f"({record.state})"
            )
        return record

    def commit(self, name: str, epoch: int, step: int, checkpoint: Path) -> JobRecord:
        """From now on the job stands at ``checkpoint``, after ``step`` steps.

        Raises
        ------
        LeaseLostError
            If the epoch is not the newest, or has committed before.
        """
        with self._writing():
            record = self.require_current(name, epoch)
            if not record.committed < step <= record.steps or self.last_commit(name) == epoch:
                raise LeaseLostError(
                    f"job {name!r}: epoch {epoch} cannot commit step {step} after "
                    f"{record.committed} of {record.steps}"
                )
            self._database.execute(
                "INSERT INTO commits VALUES (?, ?, ?, ?)", (name, epoch, record.committed, step)
            )
            is_done = step == record.steps
            self._database.execute(
                "UPDATE jobs SET committed = ?, checkpoint = ?, failures = 0, error = NULL, "
                "state = ?, finished_seconds = ? WHERE name = ?",
                (
                    step,
                    str(checkpoint),
                    "done" if is_done else "active",
                    self.seconds() if is_done else None,
                    name,
                ),
            )
        return self.job(name)

    def fail(self, name: str, epoch: int, error: str, most: int | None) -> JobRecord:
        """A start of the job has failed: its epoch is over.

        With more than ``most`` failures since the last commit the job has failed; None does not
        count this one. A job that is done stays done, and keeps the error.
        """
        with self._writing():
            record = self.job(name)
            if record.epoch != epoch:
                return record
            failures = record.failures + (most is not None)
            has_failed = record.state == "active" and most is not None and failures > most
            self._database.execute(
                "UPDATE jobs SET epoch = epoch + 1, failures = ?, error = ?, state = ? "
                "WHERE name = ?",
                (failures, error, "failed" if has_failed else record.state, name),
            )
        return self.job(name)

    def last_commit(self, name: str) -> int | None:
        """The epoch that committed last."""
        (epoch,) = self._database.execute(
            "SELECT max(epoch) FROM commits WHERE job = ?", (name,)
        ).fetchone()
        return cast("int | None", epoch)

    def commits(self, name: str) -> tuple[tuple[int, int, int], ...]:
        """What counts of the job: (epoch, steps before, steps after), in order."""
        return tuple(
            self._database.execute(
                "SELECT epoch, first, last FROM commits WHERE job = ? ORDER BY epoch", (name,)
            )
        )
