"""The scheduler's durable state: jobs, their epochs and their committed checkpoints.

A job's epoch is incremented here, durably, before the job starts; a holder of an older epoch cannot
commit. Each scheduler that opens the store begins a generation: it fences all epochs of the
previous scheduler, locks it out, and retries failed jobs.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Float,
    Integer,
    MetaData,
    Table,
    Text,
    case,
    create_engine,
    event,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from stagewright.executor.clusters.leases import JobLeaseLostError
from stagewright.graphs.documents.errors import InputError

TABLES = MetaData()

SCHEDULER = Table(
    "scheduler",
    TABLES,
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("began", Float(53), nullable=False),
)

JOBS = Table(
    "jobs",
    TABLES,
    Column("name", Text, primary_key=True),
    Column("steps", Integer, nullable=False),
    Column("epoch", Integer, nullable=False, default=0),
    Column("committed", Integer, nullable=False, default=0),
    Column("checkpoint", Text),
    Column("failures", Integer, nullable=False, default=0),
    Column("state", Text, nullable=False, default="active"),
    Column("error", Text),
    Column("finished_seconds", Float(53)),
)

COMMITS = Table(
    "commits",
    TABLES,
    Column("job", Text, primary_key=True),
    Column("epoch", Integer, primary_key=True),
    Column("first", Integer, nullable=False),
    Column("last", Integer, nullable=False),
)


FILE = "jobs.sqlite"
LOCK_SECONDS = 30.0  # how long a transaction waits for another one

State = Literal["active", "done", "failed"]


class SupersededError(JobLeaseLostError):
    """Another scheduler has taken over the folder: all leases of this scheduler have ended."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The state of a job: ``committed`` of its steps are in ``checkpoint``.

    ``failures`` counts failed starts since the last commit; ``finished_seconds`` is relative to the
    start of the first scheduler.
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
    """The jobs of a folder, seen by one scheduler.

    Raises InputError if the folder cannot be created, or its database is not a job store.

    ``url``: an SQLAlchemy URL of a database for these jobs only (default: a SQLite file in
    ``folder``).
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
        """An exclusive transaction; raises SupersededError if another scheduler has taken over."""
        with self._engine.begin() as database:
            self._require_newest(database)
            yield database

    def _require_newest(self, database: Connection) -> None:
        newest = database.scalar(select(SCHEDULER.c.generation).with_for_update())
        if newest != self.generation:
            raise SupersededError(f"{self.path}: another scheduler has taken over")

    def close(self) -> None:
        """Close the connections to the database."""
        self._engine.dispose()

    def seconds(self) -> float:
        """Wall-clock seconds since the folder's first scheduler began."""
        return time.time() - self._began

    def add(self, name: str, steps: int) -> JobRecord:
        """The state of the job, which is added if it is new.

        Raises InputError if the store has the job with another number of steps.
        """
        with self._writing() as database:
            if database.execute(select(JOBS).where(JOBS.c.name == name)).one_or_none() is None:
                database.execute(insert(JOBS).values(name=name, steps=steps))
            record = _job(database, name)
        if record.steps != steps:
            raise InputError(
                f"{self.path}: job {name!r} has {record.steps} steps there, here {steps}: use "
                "another name or another folder"
            )
        return record

    def job(self, name: str) -> JobRecord:
        """The state of the job."""
        with self._engine.begin() as database:
            return _job(database, name)

    def begin(self, name: str) -> JobRecord:
        """Start a new epoch of the job."""
        with self._writing() as database:
            return _changed(database, name, epoch=JOBS.c.epoch + 1)

    def require_current(self, name: str, epoch: int) -> JobRecord:
        """The state of the job, if ``epoch`` is its newest.

        Raises JobLeaseLostError if it is not, the job has ended, or another scheduler has taken
        over.
        """
        with self._writing() as database:
            return _current(database, name, epoch)

    def commit(self, name: str, epoch: int, step: int, checkpoint: Path) -> JobRecord:
        """Commit ``checkpoint``, after ``step`` steps, as the job's state.

        Raises JobLeaseLostError if the epoch is not the newest, or has already committed.
        """
        with self._writing() as database:
            record = _current(database, name, epoch)
            has_committed = _last_commit(database, name) == epoch
            if not record.committed < step <= record.steps or has_committed:
                raise JobLeaseLostError(
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
        """Record a failed start of the job, and end its epoch.

        With more than ``most`` failures since the last commit the job has failed; with None this
        failure is not counted. A job that is done stays done, and keeps the error.
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
        """The job's commits in order: (epoch, steps before, steps after)."""
        columns = select(COMMITS.c.epoch, COMMITS.c.first, COMMITS.c.last)
        with self._engine.begin() as database:
            rows = database.execute(columns.where(COMMITS.c.job == name).order_by("epoch"))
            return tuple((row.epoch, row.first, row.last) for row in rows)


def _engine(url: str) -> Engine:
    """An engine whose transactions are exclusive, and on disk when they end."""
    is_sqlite = url.startswith("sqlite")
    engine = create_engine(url, connect_args={"timeout": LOCK_SECONDS} if is_sqlite else {})
    if is_sqlite:
        # Python's sqlite3 begins transactions late, and as readers; this is SQLAlchemy's recipe.
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
    """Change columns of a job; returns its new state."""
    database.execute(update(JOBS).where(JOBS.c.name == name).values(**values))
    return _job(database, name)


def _current(database: Connection, name: str, epoch: int) -> JobRecord:
    record = _job(database, name)
    if record.epoch != epoch or record.state != "active":
        raise JobLeaseLostError(
            f"job {name!r}: epoch {epoch} has ended, the newest is {record.epoch} ({record.state})"
        )
    return record


def _last_commit(database: Connection, name: str) -> int | None:
    query = select(func.max(COMMITS.c.epoch)).where(COMMITS.c.job == name)
    epoch: int | None = database.scalar(query)
    return epoch
