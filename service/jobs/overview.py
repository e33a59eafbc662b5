"""What those who run a service see of its store: who waits and why, workers, and users."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from stagewright.service.jobs.records import State
from stagewright.service.jobs.rows import DELIVERIES, EVENTS, JOBS, SHARES, TOKENS, WORKERS
from stagewright.service.jobs.shares import PLACE
from stagewright.service.jobs.store import ServiceStore

ALIVE_SECONDS = 15.0  # since a worker was seen; the lease of a job
_FORGOTTEN_SECONDS = 3600.0  # after which a worker that was lost is shown no more
LISTED = 100  # jobs that wait, and users


class Presence:
    """Tells a store that a worker is there, every ``seconds`` at most.

    A store that does not answer is told the next time.
    """

    def __init__(self, store: ServiceStore, worker: str, seconds: float) -> None:
        self._store, self._worker, self._seconds = store, worker, seconds
        self._next = 0.0

    def tell(self, resident_bytes: float = 0.0) -> None:
        """The worker is there, and the process of its job has so much resident memory."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._seconds
        now, mine = self._store.clock(), WORKERS.c.name == self._worker
        values: dict[str, Any] = {"seen": now, "resident_bytes": resident_bytes}
        with contextlib.suppress(SQLAlchemyError), self._store.writing() as database:
            if database.execute(sa.update(WORKERS).where(mine).values(values)).rowcount:
                return
            values |= {"name": self._worker, "began": now}
            database.execute(sa.insert(WORKERS).values(values))
            old = WORKERS.c.seen < now - _FORGOTTEN_SECONDS
            database.execute(sa.delete(WORKERS).where(old))

    def leave(self) -> None:
        """The worker has ended."""
        mine = WORKERS.c.name == self._worker
        with contextlib.suppress(SQLAlchemyError), self._store.writing() as database:
            database.execute(sa.delete(WORKERS).where(mine))


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job of the queue: how long it has waited, in seconds, and for what."""

    id: str
    kind: str
    title: str
    user: str
    priority: int
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker: since when it is there, and what it does.

    ``since`` is when its job was begun, ``resident_bytes`` the memory of the job's process.
    """

    name: str
    alive: bool
    began: float
    seen: float
    job: str | None
    kind: str | None
    title: str | None
    user: str | None
    since: float | None
    resident_bytes: float


@dataclass(frozen=True, slots=True)
class UserRecord:
    """A user's jobs, the seconds that all that are kept have run for, and tokens by scope."""

    user: str
    running: int
    queued: int
    jobs: int
    seconds: float
    tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class Overview:
    """What a store shows at a time: of ``waiting`` jobs those that come first, and all workers.

    The oldest of all that wait has waited for ``longest_seconds``.
    """

    at: float
    jobs: dict[State, int]
    waiting: int
    longest_seconds: float
    queue: tuple[WaitingJob, ...]
    workers: tuple[WorkerRecord, ...]
    users: tuple[UserRecord, ...]


def overview(store: ServiceStore) -> Overview:
    """What a store shows now."""
    now, jobs, users, workers = store.clock(), store.counts(), _users(store), workers_of(store)
    running = {one.user: one.running for one in users}
    return Overview(
        at=now,
        jobs={state: jobs.get(state, 0) for state in State},
        waiting=jobs.get(State.QUEUED, 0),
        longest_seconds=max((age for _, age in waiting_by_kind(store).values()), default=0.0),
        queue=_queue(store, workers, running),
        workers=workers,
        users=tuple(users[:LISTED]),
    )


def _since() -> sa.ScalarSelect[Any]:
    """When a job was queued, the last time."""
    asked = sa.select(sa.func.max(EVENTS.c.at))
    return asked.where(EVENTS.c.job == JOBS.c.id, EVENTS.c.name == State.QUEUED).scalar_subquery()


def queued_at(store: ServiceStore, job: str) -> float | None:
    """When a job was queued, the last time; None if nobody knows any more."""
    with store.engine.connect() as database:
        return database.execute(sa.select(_since()).where(JOBS.c.id == job)).scalar()


def waiting_by_kind(store: ServiceStore) -> dict[str, tuple[int, float]]:
    """How many jobs of each kind wait, and for how many seconds the oldest has."""
    waits = sa.select(JOBS.c.kind, sa.func.coalesce(_since(), JOBS.c.created).label("since"))
    each = waits.where(JOBS.c.state == State.QUEUED).subquery()
    asked = sa.select(each.c.kind, sa.func.count(), sa.func.min(each.c.since))
    now = store.clock()
    with store.engine.connect() as database:
        found = database.execute(asked.group_by(each.c.kind)).all()
    return {kind: (count, max(0.0, now - since)) for kind, count, since in found}


def running_by_kind(store: ServiceStore) -> dict[str, int]:
    """How many jobs of each kind run."""
    return _tally(store, JOBS.c.kind, JOBS.c.state == State.SOLVING)


def deliveries_by_state(store: ServiceStore) -> dict[str, int]:
    """How many deliveries of webhooks are in each state, of the jobs that are kept."""
    return _tally(store, DELIVERIES.c.state)


def _tally(
    store: ServiceStore, column: sa.Column[Any], *where: sa.ColumnElement[bool]
) -> dict[str, int]:
    asked = sa.select(column, sa.func.count()).where(*where).group_by(column)
    with store.engine.connect() as database:
        return {value: count for value, count in database.execute(asked)}


def workers_of(store: ServiceStore) -> tuple[WorkerRecord, ...]:
    """The workers, those that run the longest first; lost ones for an hour."""
    now = store.clock()
    does = sa.and_(JOBS.c.worker == WORKERS.c.name, JOBS.c.state == State.SOLVING)
    asked = (
        sa.select(
            WORKERS, JOBS.c.id.label("job"), JOBS.c.kind, JOBS.c.title, JOBS.c.user,
            JOBS.c.started.label("since"),
        )
        .outerjoin(JOBS, does)
        .where(WORKERS.c.seen >= now - _FORGOTTEN_SECONDS)
        .order_by(JOBS.c.started.is_(None), JOBS.c.started, WORKERS.c.name)
    )  # fmt: skip
    with store.engine.connect() as database:
        return tuple(
            WorkerRecord(**row, alive=now - row["seen"] <= ALIVE_SECONDS)
            for row in database.execute(asked).mappings()
        )


def _queue(
    store: ServiceStore, workers: tuple[WorkerRecord, ...], running: Mapping[str, int]
) -> tuple[WaitingJob, ...]:
    """The jobs whose turn comes first, those of a user by priority, and for what each waits."""
    asked = (
        sa.select(
            JOBS.c.id, JOBS.c.kind, JOBS.c.title, JOBS.c.user, JOBS.c.priority, JOBS.c.losses,
            JOBS.c.due, sa.func.coalesce(_since(), JOBS.c.created).label("since"), PLACE,
        )
        .outerjoin(SHARES, SHARES.c.user == JOBS.c.user)
        .where(JOBS.c.state == State.QUEUED)
        .order_by("place", sa.func.coalesce(SHARES.c.virtual_seconds, 0.0), JOBS.c.created)
        .limit(LISTED)
    )  # fmt: skip
    now = store.clock()
    with store.engine.connect() as database:
        found = database.execute(asked).all()
    return tuple(
        WaitingJob(
            one.id, one.kind, one.title, one.user, one.priority, max(0.0, now - one.since),
            _why(one, place, now, workers, running.get(one.user, 0)),
        )
        for place, one in enumerate(found)
    )  # fmt: skip


def _why(job: Any, place: int, now: float, workers: tuple[WorkerRecord, ...], running: int) -> str:
    """For what a job waits, in words; ``place`` counts from the head of the list."""
    if job.due > now:
        return f"{job.due - now:.0f} s more, after its worker was lost ({job.losses} times)"
    alive = [one for one in workers if one.alive]
    if not alive:
        return "no worker is alive"
    idle = sum(one.job is None for one in alive)
    if idle:
        return "is begun next" if place < idle else "the jobs before it"
    if len(alive) == 1:
        return "the worker is busy" + " with a job of theirs" * bool(running)
    return f"all {len(alive)} workers are busy" + f", {running} with jobs of theirs" * bool(running)


def _users(store: ServiceStore) -> list[UserRecord]:
    """All users, those with the most jobs that run or wait first."""
    now = store.clock()
    ran = sa.case(
        (JOBS.c.state == State.SOLVING, now - JOBS.c.started),
        else_=JOBS.c.finished - JOBS.c.started,
    )
    of_jobs = sa.select(
        JOBS.c.user, JOBS.c.state, sa.func.count(), sa.func.coalesce(sa.func.sum(ran), 0.0)
    ).group_by(JOBS.c.user, JOBS.c.state)
    of_tokens = sa.select(TOKENS.c.user, TOKENS.c.scope, sa.func.count()).group_by(
        TOKENS.c.user, TOKENS.c.scope
    )
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    seconds: dict[str, float] = defaultdict(float)
    tokens: dict[str, dict[str, int]] = defaultdict(dict)
    with store.engine.connect() as database:
        for user, state, count, spent in database.execute(of_jobs):
            counts[user][state] = count
            seconds[user] += max(0.0, spent)
        for user, scope, count in database.execute(of_tokens):
            tokens[user][scope] = count
    found = [
        UserRecord(
            user=user,
            running=counts[user].get(State.SOLVING, 0),
            queued=counts[user].get(State.QUEUED, 0),
            jobs=sum(counts[user].values()),
            seconds=seconds[user],
            tokens=tokens[user],
        )
        for user in counts.keys() | tokens.keys()
    ]
    return sorted(found, key=lambda one: (-one.running, -one.queued, -one.seconds, one.user))
