"""What must outlive the scheduler: jobs, their epochs and their committed checkpoints.

A job's epoch is raised here, durably, before the job starts anywhere; whoever holds an older epoch
can commit nothing. Each scheduler that opens the store begins a generation: it fences all epochs of
the one before, shuts it out, and gives jobs that had failed another chance.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, Engine, case, create_engine, event, func, insert, select, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from stagewright.executor.clusters.job_tables import COMMITS, JOBS, SCHEDULER, TABLES
from stagewright.executor.clusters.leases import LeaseLostError
from stagewright.graphs.documents.errors import InputError

FILE = "jobs.sqlite"
LOCK_SECONDS = 30.0  # how long a transaction waits for another's

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

    Parameters
    ----------
    url
        An SQLAlchemy URL of a database for these jobs alone; a SQLite file in ``folder`` if left
        out.

    Raises
    ------
    InputError
        If the folder cannot be made, or its store is none of ours.
    """

    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.path = str(folder / FILE) if url is None else url.rpartition("@")[2]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._engine = _engine(f"sqlite:///{folder / FILE}" if url is None else url)
            TABLES.create_all(self._engine)
            self._take_over()
        except (OSError, ImportError, SQLAlchemyError) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            raise InputError(f"{self.path}: no store of jobs can be kept here: {cause}") from None

    def _take_over(self) -> None:
        with self._engine.begin() as database:
            row = database.execute(select(SCHEDULER).with_for_update()).one_or_none()
            generation, began = (0, time.time()) if row is None else (row.generation, row.began)
            self.generation, self._began = int(generation) + 1, float(began)
            values = {"generation": self.generation, "began": self._began}
            statement = insert(SCHEDULER) if row is None else update(SCHEDULER)
            database.execute(statement.values(values))
            state = case((JOBS.c.state == "failed", "active"), else_=JOBS.c.state)
            database.execute(update(JOBS).values(epoch=JOBS.c.epoch + 1, failures=0, state=state))

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A transaction that no other can interleave with, of the newest scheduler."""
        with self._engine.begin() as database:
            self._require_newest(database)
            yield database

    def _require_newest(self, database: Connection) -> None:
        newest = database.scalar(select(SCHEDULER.c.generation).with_for_update())
        if newest != self.generation:
            raise SupersededError(f"{self.path}: another scheduler has taken over")

    def close(self) -> None:
        """Let go of the database."""
        self._engine.dispose()

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
        with self._writing() as database:
            if database.execute(select(JOBS).where(JOBS.c.name == name)).one_or_none() is None:
                database.execute(insert(JOBS).values(name=name, steps=steps))
            record = _job(database, name)
        if record.steps != steps:
            raise InputError(
                f"{self.path}: job {name!r} has {record.steps} steps there, here {steps}: name it "
                "otherwise, or use another folder"
            )
        return record

    def job(self, name: str) -> JobRecord:
        """The job as it stands."""
        with self._engine.begin() as database:
            return _job(database, name)

    def begin(self, name: str) -> JobRecord:
        """The job with a new epoch, which no one has held."""
        with self._writing() as database:
            return _changed(database, name, epoch=JOBS.c.epoch + 1)

    def require_current(self, name: str, epoch: int) -> JobRecord:
        """The job, if ``epoch`` is its newest.

        Raises
        ------
        LeaseLostError
            If it is not, or the job is over, or another scheduler has taken over.
        """
        with self._writing() as database:
            return _current(database, name, epoch)

    def commit(self, name: str, epoch: int, step: int, checkpoint: Path) -> JobRecord:
        """From now on the job stands at ``checkpoint``, after ``step`` steps.

        Raises
        ------
        LeaseLostError
            If the epoch is not the newest, or has committed before.
        """
        with self._writing() as database:
            record = _current(database, name, epoch)
            has_committed = _last_commit(database, name) == epoch
            if not record.committed < step <= record.steps or has_committed:
                raise LeaseLostError(
                    f"job {name!r}: epoch {epoch} cannot commit step {step} after "
                    f"{record.committed} of {record.steps}"
                )
            row = {"job": name, "epoch": epoch, "first": record.committed, "last": step}
            database.execute(insert(COMMITS).values(row))
            is_done = step == record.steps
            return _changed(
                database,
                name,
                committed=step,
                checkpoint=str(checkpoint),
                failures=0,
                error=None,
                state="done" if is_done else "active",
                finished_seconds=self.seconds() if is_done else None,
            )

    def fail(self, name: str, epoch: int, error: str, most: int | None) -> JobRecord:
        """A start of the job has failed: its epoch is over.

        With more than ``most`` failures since the last commit the job has failed; None does not
        count this one. A job that is done stays done, and keeps the error.
        """
        with self._writing() as database:
            record = _job(database, name)
            if record.epoch != epoch:
                return record
            failures = record.failures + (most is not None)
            has_failed = record.state == "active" and most is not None and failures > most
            state = "failed" if has_failed else record.state
            return _changed(
                database, name, epoch=epoch + 1, failures=failures, error=error, state=state
            )

    def last_commit(self, name: str) -> int | None:
        """The epoch that committed last."""
        with self._engine.begin() as database:
            return _last_commit(database, name)

    def commits(self, name: str) -> tuple[tuple[int, int, int], ...]:
        """What counts of the job: (epoch, steps before, steps after), in order."""
        columns = select(COMMITS.c.epoch, COMMITS.c.first, COMMITS.c.last)
        with self._engine.begin() as database:
            rows = database.execute(columns.where(COMMITS.c.job == name).order_by("epoch"))
            return tuple((row.epoch, row.first, row.last) for row in rows)


def _engine(url: str) -> Engine:
    """Connections whose transactions are on the disk when they end, and exclude each other."""
    is_sqlite = url.startswith("sqlite")
    engine = create_engine(url, connect_args={"timeout": LOCK_SECONDS} if is_sqlite else {})
    if is_sqlite:
        # Python's sqlite3 would begin transactions late, and as readers: SQLAlchemy's own recipe.
        event.listen(engine, "connect", _leave_transactions)
        event.listen(engine, "begin", lambda found: found.exec_driver_sql("BEGIN IMMEDIATE"))
    return engine


def _leave_transactions(connection: Any, _: Any) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA synchronous = FULL")


def _job(database: Connection, name: str) -> JobRecord:
    row = database.execute(select(JOBS).where(JOBS.c.name == name)).one()
    return JobRecord(**row._mapping)


def _changed(database: Connection, name: str, **values: Any) -> JobRecord:
    """The job after these columns were changed."""
    database.execute(update(JOBS).where(JOBS.c.name == name).values(**values))
    return _job(database, name)


def _current(database: Connection, name: str, epoch: int) -> JobRecord:
    record = _job(database, name)
    if record.epoch != epoch or record.state != "active":
        raise LeaseLostError(
            f"job {name!r}: epoch {epoch} is over, the newest is {record.epoch} ({record.state})"
        )
    return record


def _last_commit(database: Connection, name: str) -> int | None:
    query = select(func.max(COMMITS.c.epoch)).where(COMMITS.c.job == name)
    epoch: int | None = database.scalar(query)
    return epoch
