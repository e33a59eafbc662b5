"""The store: jobs, their events and answers in SQLite or PostgreSQL, as users see them."""

import hashlib
import importlib.metadata
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError, TimeoutError

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.rates import FOLDER as RATES
from stagewright.service.jobs import shares
from stagewright.service.jobs.records import ENDED, Event, JobEnding, ServiceJob, State, StoppedBy
from stagewright.service.jobs.rows import (
    DELIVERIES,
    EVENTS,
    JOBS,
    LOCK_SECONDS,
    WHOLE,
    NewerStoreError,
    engine_of,
    job_of,
    migrate,
    newest,
    tell,
    writing,
)
from stagewright.service.jobs.signals import Signals

PAGE = 100  # jobs of a page at most
EVENTS_READ = 1000  # events of a job at a time at most
_TITLE = 200  # characters of a title at most
# The first complete answer of a digest, made once since each submission asks for it.
_KNOWN = (
    sa.select(
        JOBS.c.id, JOBS.c.state, JOBS.c.answer, JOBS.c.document, JOBS.c.reason, JOBS.c.cost,
        JOBS.c.bound, JOBS.c.cached_from,
    )
    .where(JOBS.c.digest == sa.bindparam("digest"))
    .where(JOBS.c.state.in_((State.OPTIMAL, State.INFEASIBLE)))
    .order_by(JOBS.c.finished)
    .limit(1)
)  # fmt: skip


class ConflictError(Exception):
    """The request contradicts what is stored: one line says what."""


class ServiceStore:
    """The jobs of a service.

    Parameters
    ----------
    url
        An SQLAlchemy URL: ``sqlite:///FILE``, or of PostgreSQL.
    clock
        Seconds since 1970; workers and servers of one store need clocks that agree to a second.

    Raises
    ------
    InputError
        If no store can be opened or made there, or a newer version has made it.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        try:
            self._engine = engine_of(url)
            migrate(self._engine)
        except (ImportError, NewerStoreError, SQLAlchemyError) as error:
            raise _unusable(url, error) from None
        self.signals = Signals(self._engine)
        self._writer = threading.Lock()

    @property
    def engine(self) -> sa.Engine:
        """The database, for what else is kept in it."""
        return self._engine

    def close(self) -> None:
        """Give the connections back."""
        self.signals.close()
        self._engine.dispose()

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A transaction that writes; who waits for its events is woken after it."""
        with self._turn(), writing(self._engine) as database:
            yield database
        self.signals.look()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One thread of this process at a time writes in SQLite.

        SQLite makes those that wait for its lock sleep, up to a tenth of a second, and serves none
        in turn.
        """
        if self._engine.dialect.name != "sqlite":
            yield
            return
        if not self._writer.acquire(timeout=LOCK_SECONDS):
            raise TimeoutError(f"the store is locked for more than {LOCK_SECONDS:g} s")
        try:
            yield
        finally:
            self._writer.release()

    def ping(self) -> None:
        """Write what is there already; raises ``SQLAlchemyError`` where nothing can be written."""
        with self.writing() as database:
            database.execute(sa.text("UPDATE alembic_version SET version_num = version_num"))

    # --- Users --------------------------------------------------------------------------------

    def submit(
        self,
        user: str,
        kind: str,
        request: str,
        priority: int = 0,
        key: str | None = None,
        *,
        title: str = "",
        webhook: str | None = None,
        user_class: str | None = None,
        trace: str | None = None,
        limit_seconds: float | None = None,
    ) -> tuple[ServiceJob, bool]:
        """Queue a validated request; the job, and whether it is new.

        A request with the ``key`` of an earlier one is that one. A request that was answered
        completely before, for anybody, has its answer at once. ``title`` tells the job from others
        in lists; ``webhook`` is the URL that is told of its end; ``user_class`` and ``trace`` are
        those of `ServiceJob`; ``limit_seconds`` is how long the request may be searched for.

        Raises
        ------
        ConflictError
            If the key was used for another request.
        """
        digest = _digest(kind, request)
        values: dict[str, Any] = {
            "id": uuid.uuid4().hex, "kind": kind, "user": user, "state": State.QUEUED,
            "request": request, "digest": digest, "priority": priority, "created": self.clock(),
            "attempts": 0, "losses": 0, "reason": "", "idempotency_key": key,
            "title": title[:_TITLE], "webhook": webhook, "user_class": user_class, "trace": trace,
            "limit_seconds": limit_seconds, "spent_seconds": 0.0,
        }  # fmt: skip
        try:
            with self.writing() as database:
                values |= self._known(database, digest)
                if values["state"] == State.QUEUED:
                    shares.enter(database, user, self.clock())
                database.execute(sa.insert(JOBS), values)
                tell(database, self.clock(), values["id"], str(values["state"]))
        except IntegrityError:
            earlier = self._of_key(user, key)
            if earlier is None or (earlier.kind, earlier.request) != (kind, request):
                raise ConflictError(
                    f"the idempotency key {key!r} belongs to another request"
                ) from None
            return earlier, False
        if values["state"] == State.QUEUED:
            return job_of(values), True
        return self._stored(values["id"]), True

    def sign(self, job: ServiceJob) -> None:
        """Name a claimed job by this version, which answers it; another may have queued it."""
        digest = _digest(job.kind, job.request)
        if digest != job.digest:
            with self.writing() as database:
                database.execute(sa.update(JOBS).where(JOBS.c.id == job.id).values(digest=digest))

    def knows(self, user: str, kind: str, request: str, key: str | None) -> bool:
        """Whether a submission adds nothing to the queue: its key is known, or its answer."""
        if key is not None and self._of_key(user, key) is not None:
            return True
        with self._engine.connect() as database:
            return database.execute(_KNOWN, {"digest": _digest(kind, request)}).first() is not None

    def _known(self, database: sa.Connection, digest: str) -> dict[str, Any]:
        """The fields of an earlier complete answer to the same request; empty without one."""
        row = database.execute(_KNOWN, {"digest": digest}).one_or_none()
        if row is None:
            return {}
        found, now = dict(row._mapping), self.clock()
        own = found.pop("id")
        return found | {
            "cached_from": found["cached_from"] or own, "started": now, "finished": now,
        }  # fmt: skip

    def _of_key(self, user: str, key: str | None) -> ServiceJob | None:
        mine = (JOBS.c.user == user, JOBS.c.idempotency_key == key)
        return self._one(WHOLE.where(*mine))

    def get(self, job: str, user: str | None = None) -> ServiceJob | None:
        """The job of that id, of that user if one is given; None if there is none."""
        asked = WHOLE.where(JOBS.c.id == job)
        return self._one(asked if user is None else asked.where(JOBS.c.user == user))

    def _stored(self, job: str) -> ServiceJob:
        found = self.get(job)
        assert found is not None
        return found

    def _one(self, asked: sa.Select[Any]) -> ServiceJob | None:
        with self._engine.connect() as database:
            row = database.execute(asked).one_or_none()
        return None if row is None else job_of(dict(row._mapping))

    def page(
        self,
        user: str | None,
        *,
        before: str | None = None,
        state: State | None = None,
        limit: int = PAGE,
    ) -> list[ServiceJob]:
        """The newest jobs (None: of all users), from before the job of that id on."""
        last = None if before is None else self.get(before, user)
        asked = newest(WHOLE, JOBS, limit, None if last is None else (last.created, last.id))
        if user is not None:
            asked = asked.where(JOBS.c.user == user)
        if state is not None:
            asked = asked.where(JOBS.c.state == state)
        with self._engine.connect() as database:
            return [job_of(dict(row._mapping)) for row in database.execute(asked)]

    def ask(self, job: str, what: JobEnding) -> ServiceJob:
        """Ask a job to end: a queued one ends now, a running one as soon as its worker hears it.

        Raises
        ------
        ConflictError
            If the job has ended.
        """
        with self.writing() as database:
            self._ask(database, job, what)
        return self._stored(job)

    def _ask(self, database: sa.Connection, job: str, what: JobEnding) -> None:
        asked = sa.select(JOBS.c.state, JOBS.c.document, JOBS.c.asked).where(JOBS.c.id == job)
        row = database.execute(asked.with_for_update()).one_or_none()
        if row is None or row.state in ENDED:
            raise ConflictError("the job has ended")
        values: dict[str, Any] = {"asked": row.asked if row.asked == JobEnding.ABORT else what}
        name, told = "asked", dict(values)
        if row.state == State.QUEUED:
            # A worker that was lost may have found a plan.
            kept = what is JobEnding.STOP and row.document is not None
            name, told = State.FEASIBLE if kept else State.FAILED, {"stopped_by": StoppedBy.USER}
            why = "stopped after its worker was lost" if kept else "stopped before it was begun"
            values |= told | {"state": name, "finished": self.clock(), "reason": why}
            if not kept:
                values["answer"] = None  # of an earlier attempt
        database.execute(sa.update(JOBS).where(JOBS.c.id == job).values(values))
        tell(database, self.clock(), job, name, told)

    def retry(self, job: str, *, fresh: bool = False) -> ServiceJob:
        """Queue a job again that has failed, or ended before its search was complete.

        ``fresh``: any that has ended, without what it has found.

        Raises
        ------
        ConflictError
            If it has not ended, or has a complete answer.
        """
        again = ENDED if fresh else (State.FAILED, State.FEASIBLE)
        found = ("cost", "bound", "answer", "document", "cached_from") if fresh else ()
        known = self.get(job)
        with self.writing() as database:
            if known is not None:
                shares.enter(database, known.user, self.clock())
            changed = database.execute(
                sa.update(JOBS)
                .where(JOBS.c.id == job, JOBS.c.state.in_(again))
                .values(
                    **dict.fromkeys(found),
                    digest=known and _digest(known.kind, known.request),
                    state=State.QUEUED, stopped_by=None, asked=None, attempts=0, losses=0, due=0.0,
                    spent_seconds=0.0, spared=0, started=None, finished=None, reason="",
                )
            ).rowcount  # fmt: skip
            if not changed:
                which = "ended" if fresh else "failed or was stopped"
                raise ConflictError(f"only a job that has {which} is tried again")
            database.execute(
                sa.delete(DELIVERIES).where(DELIVERIES.c.job == job)
            )  # of an end undone
            tell(database, self.clock(), job, State.QUEUED)
        return self._stored(job)

    def discard(self, job: str) -> None:
        """Delete a job that has ended, with its events.

        Raises
        ------
        ConflictError
            If it has not ended.
        """
        with self.writing() as database:
            ended = database.execute(
                sa.select(JOBS.c.id).where(JOBS.c.id == job, JOBS.c.state.in_(ENDED))
            ).one_or_none()
            if ended is None:
                raise ConflictError("only a job that has ended is discarded: stop it first")
            database.execute(sa.delete(EVENTS).where(EVENTS.c.job == job))
            database.execute(sa.delete(JOBS).where(JOBS.c.id == job))

    def discard_ended(self, before: float) -> int:
        """Delete the jobs that ended before that time, with their events; how many there were."""
        with self.writing() as database:
            old = sa.select(JOBS.c.id).where(JOBS.c.state.in_(ENDED), JOBS.c.finished < before)
            database.execute(sa.delete(EVENTS).where(EVENTS.c.job.in_(old)))
            return database.execute(sa.delete(JOBS).where(JOBS.c.id.in_(old))).rowcount

    def events(self, job: str, after: int = 0, limit: int = EVENTS_READ) -> list[Event]:
        """What happened to a job after the event of that number, in order."""
        asked = (
            sa.select(EVENTS)
            .where(EVENTS.c.job == job, EVENTS.c.number > after)
            .order_by(EVENTS.c.number)
            .limit(limit)
        )
        with self._engine.connect() as database:
            return [Event(**row._mapping) for row in database.execute(asked)]

    def queued(self, user: str) -> tuple[int, float]:
        """How many jobs of a user wait in the queue, and how long their searches may take."""
        left = sa.func.sum(JOBS.c.limit_seconds - JOBS.c.spent_seconds)
        asked = sa.select(sa.func.count(), sa.func.coalesce(left, 0.0)).where(
            JOBS.c.user == user, JOBS.c.state == State.QUEUED
        )
        with self._engine.connect() as database:
            count, seconds = database.execute(asked).one()
        return count, seconds

    def standing(self, jobs: Sequence[ServiceJob], most_running: int | None) -> dict[str, str]:
        """Why each of the jobs that wait does, by their ids."""
        with self._engine.connect() as database:
            return shares.standing(database, jobs, self.clock(), most_running)

    def weigh(self, user: str, weight: float) -> None:
        """Give a user ``weight`` times the share of one without a weight."""
        with self.writing() as database:
            shares.weigh(database, user, weight)

    def counts(self) -> dict[State, int]:
        """How many jobs are in each state."""
        asked = sa.select(JOBS.c.state, sa.func.count()).group_by(JOBS.c.state)
        with self._engine.connect() as database:
            return {State(state): count for state, count in database.execute(asked)}


@lru_cache(maxsize=1)
def _version() -> str:
    """What answers depend on beside their requests: this version, and its rate sets."""
    rates = hashlib.sha256()
    for one in sorted(RATES.glob("*.json")):
        rates.update(one.name.encode() + one.read_bytes())
    return f"{importlib.metadata.version('stagewright')} {rates.hexdigest()}"


def _digest(kind: str, request: str) -> str:
    """Names a request and the version that answers it: an upgrade serves no older answer."""
    return hashlib.sha256(f"{_version()} {kind} {request}".encode()).hexdigest()


@contextmanager
def opened(url: str) -> Iterator[ServiceStore]:
    """A store that is closed at the end; InputError if what is stored cannot be read."""
    store = ServiceStore(url)
    try:
        yield store
    except SQLAlchemyError as error:
        raise _unusable(url, error) from None
    finally:
        store.close()


def _unusable(url: str, error: Exception) -> InputError:
    cause = error.orig if isinstance(error, DBAPIError) else error
    place = url.rpartition("@")[2]
    return InputError(f"{place}: no store of jobs can be kept here: {cause}")
