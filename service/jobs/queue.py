"""The queue of jobs, as workers see it.

A worker claims the next job for a lease, which it renews. A job whose lease has run out is queued
again after a pause, one that its worker gives back at once. What a worker writes counts only while
it holds the lease.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, func, select, text, update

from stagewright.service.jobs import shares
from stagewright.service.jobs.records import (
    JobEnd,
    JobEnding,
    ServiceJob,
    State,
    StoppedBy,
)
from stagewright.service.jobs.rows import JOBS, SHARES, tell
from stagewright.service.jobs.store import ServiceStore

MOST_ATTEMPTS = 3  # times that a job's own process may end without an answer
LOSS_PAUSES = (0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0)  # seconds after each loss
_LOOKED_SECONDS = 5.0  # in which every worker that is free has looked at the queue
_LOCK = 0x5354_4148  # names the lock of PostgreSQL's: any number that no one else takes
# Of a job that a worker has: without its texts, which may be long.
_LEASED = select(
    JOBS.c.id, JOBS.c.user, JOBS.c.started, JOBS.c.leased_until, JOBS.c.asked, JOBS.c.attempts,
    JOBS.c.losses, JOBS.c.spent_seconds, JOBS.c.cost, JOBS.c.bound,
    JOBS.c.document.is_not(None).label("has_plan"),
)  # fmt: skip


class JobLeaseLostError(Exception):
    """Another worker has the job, or it has ended: what this one has found does not count."""


@dataclass(frozen=True, slots=True)
class QueueRules:
    """What a queue keeps to besides the users' shares.

    ``running`` jobs of a user at a time, at most; further ones wait. A job with a plan that has run
    for ``preempt_seconds`` gives way to one that has none, of a user below their share. None: no
    limit, and never.
    """

    running: int | None = None
    preempt_seconds: float | None = None


class Queue:
    """The queue of a store."""

    def __init__(self, store: ServiceStore, rules: QueueRules = QueueRules()) -> None:
        self.store, self.rules = store, rules
        self._engine, self._clock = store.engine, store.clock

    def claim(self, worker: str, lease_seconds: float) -> ServiceJob | None:
        """The next job for a worker: of the user whose turn it is, of the highest priority."""
        if not self._any(*self._waiting()):
            return None
        with self._in_turn() as database:
            row = self._next(database)
            if row is None:
                return None
            self._begin(database, row, worker, lease_seconds)
        return self.store.get(row.id)

    def give_way(
        self, job: str, worker: str, lease_seconds: float, searched_seconds: float
    ) -> ServiceJob | None:
        """Begin another job in place of this one, which is queued again with its plan.

        It has so much less of its time limit left as it was searched for.

        None if it goes on: by `QueueRules`, because another one that runs is of a user who has used
        more, or because it has found nothing better since it gave way before. Raises
        JobLeaseLostError as `renew`.
        """
        if self.rules.preempt_seconds is None or not self._any(*self._without_plan()):
            return None
        with self._in_turn() as database:
            mine = self._held(database, job, worker)
            gives = database.execute(self._giving_way()).first()
            if gives is None or gives.id != job:
                return None
            row = self._next(database, gives.virtual_seconds, *self._without_plan())
            if row is None:
                return None
            spent = mine.spent_seconds + searched_seconds
            values = {"attempts": mine.attempts - 1, "spent_seconds": spent, "spared": 1}
            self._give_back_lease(database, mine)
            self._begin(database, row, worker, lease_seconds)
            why = "it has a plan, and gave way to a job without one"
            self._queue_again(database, mine, why, **values)
        return self.store.get(row.id)

    def renew(self, job: str, worker: str, lease_seconds: float) -> JobEnding | None:
        """Renew a lease; what the user asks of the job.

        Raises
        ------
        JobLeaseLostError
            If this worker does not have it any more.
        """
        with self.store.writing() as database:
            row, until = self._held(database, job, worker), self._clock() + lease_seconds
            _write(database, job, leased_until=until)
            # Of clocks that jump nobody is charged.
            paid = min(max(0.0, until - row.leased_until), lease_seconds)
            shares.charge(database, row.user, paid, self._clock())
        return None if row.asked is None else JobEnding(row.asked)

    def improve(
        self,
        job: str,
        worker: str,
        cost: float | None,
        bound: float | None,
        document: str | None = None,
        plans: dict[str, Any] | None = None,
        doing: str = "",
    ) -> None:
        """Store a better answer so far, or bound; raises JobLeaseLostError as `renew`.

        ``doing`` is told only: what is done before the search.

        ``plans`` is the class of plans that the bound is of, where it is known. An answer that is
        no better than that of an earlier worker is not kept, nor is the bound of its class.
        """
        with self.store.writing() as database:
            row = self._held(database, job, worker)
            least, kept = row.cost, dict[str, Any](bound=row.bound)
            if plans is None:
                kept["bound"] = _higher(row.bound, bound)
            elif least is None or (cost is not None and cost <= least):
                kept["bound"] = bound
            if document is not None and (least is None or cost is None or cost < least):
                # An answer that an earlier attempt gave is of another plan.
                kept |= {"cost": cost, "document": document, "answer": None, "spared": 0}
            _write(database, job, **kept)
            news = {"cost": cost, "bound": bound, "plans": plans}
            self._tell(database, job, "progress", news | ({"doing": doing} if doing else {}))

    def finish(self, job: str, worker: str, outcome: JobEnd) -> None:
        """Store how a job ended; raises JobLeaseLostError as `renew`.

        A cost, bound or document that the outcome lacks, or that is worse, stays that of the best
        answer so far.
        """
        with self.store.writing() as database:
            row = self._held(database, job, worker)
            self._give_back_lease(database, row)
            self._end(database, row, outcome)

    def give_back(self, job: str, worker: str, reason: str, *, counted: bool) -> None:
        """Queue a claimed job again, at once; raises JobLeaseLostError as `renew`.

        Its best answer so far is kept. ``counted``: as one of its own attempts. One that was asked
        to end ends.
        """
        with self.store.writing() as database:
            row = self._held(database, job, worker)
            self._give_back_lease(database, row)
            if row.asked is not None:
                self._end_with_best(database, row, StoppedBy.USER, reason)
                return
            self._queue_again(database, row, reason, attempts=row.attempts - (not counted))

    def expire(self) -> int:
        """End the leases that have run out: jobs are queued again, or end; how many there were."""
        if not self._any(*self._overdue()):
            return 0
        with self._in_turn() as database:
            overdue = _LEASED.where(*self._overdue()).order_by(JOBS.c.id)
            lost = database.execute(overdue.with_for_update(skip_locked=True)).all()
            for row in lost:
                self._lose(database, row)
        return len(lost)

    def _any(self, *conditions: ColumnElement[bool]) -> bool:
        """Whether a job meets the conditions; asked without a lock, as workers ask all the time."""
        with self._engine.connect() as database:
            found = database.execute(select(JOBS.c.id).where(*conditions).limit(1)).first()
        return found is not None

    def _waiting(self) -> tuple[ColumnElement[bool], ...]:
        return (JOBS.c.state == State.QUEUED, JOBS.c.due <= self._clock())

    def _overdue(self) -> tuple[ColumnElement[bool], ...]:
        return (JOBS.c.state == State.SOLVING, JOBS.c.leased_until < self._clock())

    def _without_plan(self) -> tuple[ColumnElement[bool], ...]:
        """Of jobs that wait: there is no plan yet, nor did another worker look since it is due."""
        late = self._clock() - _LOOKED_SECONDS
        return (*self._waiting(), JOBS.c.document.is_(None), JOBS.c.created <= late,
                JOBS.c.due <= late)  # fmt: skip

    @contextmanager
    def _in_turn(self) -> Iterator[Connection]:
        """A transaction that writes of several users: one at a time, of all servers."""
        with self.store.writing() as database:
            if self._engine.dialect.name == "postgresql":
                database.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            yield database

    def _next(
        self, database: Connection, below: float = math.inf, *conditions: ColumnElement[bool]
    ) -> Any:
        """The next job, of a user with less virtual time than ``below``.

        The jobs of users whose next one does not meet the conditions are not looked at.
        """
        asked = conditions or self._waiting()
        held_back = list[str]()
        for turn in shares.turns(database):
            if turn.virtual_seconds >= below:
                return None
            if self.rules.running is not None and turn.running >= self.rules.running:
                held_back.append(turn.user)
                continue
            row = database.execute(_first(JOBS.c.user == turn.user, *asked)).one_or_none()
            if row is not None:
                shares.keep_up(database, held_back, turn.virtual_seconds)
                return row
        return None

    def _begin(self, database: Connection, row: Any, worker: str, lease_seconds: float) -> None:
        now = self._clock()
        _write(
            database, row.id, state=State.SOLVING, worker=worker, leased_until=now + lease_seconds,
            attempts=JOBS.c.attempts + 1, started=now, asked=None,
        )  # fmt: skip
        shares.charge(database, row.user, lease_seconds, now)
        self._tell(database, row.id, State.SOLVING)

    def _giving_way(self) -> Select[Any]:
        """The running job that gives way first: that of who has used the most."""
        long = self._clock() - (self.rules.preempt_seconds or 0.0)
        return (
            select(JOBS.c.id, SHARES.c.virtual_seconds)
            .join(SHARES, SHARES.c.user == JOBS.c.user)
            .where(JOBS.c.state == State.SOLVING, JOBS.c.started <= long, JOBS.c.spared == 0)
            .where(JOBS.c.document.is_not(None), JOBS.c.asked.is_(None))
            .order_by(SHARES.c.virtual_seconds.desc(), JOBS.c.started, JOBS.c.id)
            .limit(1)
        )

    def _give_back_lease(self, database: Connection, row: Any) -> None:
        """What is left of a lease is not the user's to pay."""
        left = row.leased_until - max(self._clock(), row.started)
        shares.charge(database, row.user, -max(0.0, left), self._clock())

    def _lose(self, database: Connection, row: Any) -> None:
        """Queue a job again whose server is lost, after a pause, or end it.

        The loss is not counted as an attempt: the server may have been lost over another job.
        """
        losses, why = row.losses + 1, "its worker was lost"
        if row.asked is not None:
            self._end_with_best(database, row, StoppedBy.USER, why)
        elif losses > len(LOSS_PAUSES):
            self._end_with_best(database, row, StoppedBy.LOST, f"{why}, for the {losses}. time")
        else:
            due = self._clock() + LOSS_PAUSES[losses - 1]
            counts = {"losses": losses, "attempts": row.attempts - 1, "due": due}
            self._queue_again(database, row, why, **counts)

    def _queue_again(self, database: Connection, row: Any, reason: str, **values: Any) -> None:
        shares.enter(database, row.user, self._clock())
        values |= {"state": State.QUEUED, "worker": None, "leased_until": None}
        _write(database, row.id, **values)
        self._tell(database, row.id, State.QUEUED, {"reason": reason})

    def _end_with_best(self, database: Connection, row: Any, by: StoppedBy, reason: str) -> None:
        kept = row.has_plan and row.asked != JobEnding.ABORT
        state = State.FEASIBLE if kept else State.FAILED
        self._end(database, row, JobEnd(state, reason=reason, stopped_by=by))

    def _end(self, database: Connection, row: Any, outcome: JobEnd) -> None:
        _write(
            database, row.id, state=outcome.state, stopped_by=outcome.stopped_by,
            reason=outcome.reason.replace("\0", ""),  # which PostgreSQL refuses
            finished=self._clock(), worker=None, leased_until=None, **_changes(row.cost, outcome),
        )  # fmt: skip
        self._tell(database, row.id, outcome.state, {"stopped_by": outcome.stopped_by})

    def _held(self, database: Connection, job: str, worker: str) -> Any:
        """A job of which this worker has the lease."""
        mine = (JOBS.c.id == job, JOBS.c.state == State.SOLVING, JOBS.c.worker == worker)
        row = database.execute(_LEASED.where(*mine).with_for_update()).one_or_none()
        if row is None:
            raise JobLeaseLostError(job)
        return row

    def _tell(
        self, database: Connection, job: str, name: str, data: dict[str, Any] | None = None
    ) -> None:
        tell(database, self._clock(), job, name, data)


def _first(*conditions: ColumnElement[bool]) -> Select[Any]:
    """The oldest job of the highest priority, by two looks into the index."""
    highest = select(func.max(JOBS.c.priority)).where(*conditions).scalar_subquery()
    return (
        select(JOBS.c.id, JOBS.c.user)
        .where(*conditions, JOBS.c.priority == highest)
        .order_by(JOBS.c.created, JOBS.c.id)
        .limit(1)
        .with_for_update(skip_locked=True, of=JOBS)
    )


def _write(database: Connection, job: str, **values: Any) -> None:
    database.execute(update(JOBS).where(JOBS.c.id == job).values(values))


def _changes(cost: float | None, outcome: JobEnd) -> dict[str, Any]:
    """What an outcome changes of the best answer so far, which may be an earlier worker's.

    The bound stays with its answer: those of others may be of other classes of plans.
    """
    names = ("answer", "document", "cost", "bound")
    given = {name: getattr(outcome, name) for name in names if getattr(outcome, name) is not None}
    worse = cost is not None and outcome.cost is not None and cost < outcome.cost
    if worse and outcome.state is State.FEASIBLE:
        return {}
    if outcome.state is State.FAILED:
        given["answer"] = outcome.answer  # that of an earlier attempt counts no more
    return given


def _higher(*bounds: float | None) -> float | None:
    """The strongest of lower bounds."""
    return max((one for one in bounds if one is not None), default=None)
