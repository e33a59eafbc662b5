"""The queue of jobs, as workers see it, and the deliveries of webhooks that are due.

A worker claims the next job for a lease, which it renews. A job whose lease has run out is queued
again after a pause, one that its worker gives back at once. What a worker writes counts only while
it holds the lease.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, select, update

from stagewright.service.jobs.records import (
    DeliveryState,
    JobEnd,
    JobEnding,
    ServiceJob,
    State,
    StoppedBy,
)
from stagewright.service.jobs.rows import DELIVERIES, JOBS, tell
from stagewright.service.jobs.store import ServiceStore

PAUSES = (30.0, 120.0, 480.0, 1920.0, 7680.0, 30720.0)  # seconds before each further attempt


@dataclass(frozen=True, slots=True)
class Delivery:
    """A webhook of a job that has ended; ``number`` is the same at every attempt."""

    number: int
    job: str
    url: str
    is_last: bool


class Deliveries:
    """The deliveries of a store."""

    def __init__(self, store: ServiceStore) -> None:
        self._store, self._engine, self._clock = store, store.engine, store.clock

    def claim(self) -> Delivery | None:
        """The next delivery that is due; unless it is `done` it is due again after a pause."""
        due = (DELIVERIES.c.state == DeliveryState.WAITING, DELIVERIES.c.due <= self._clock())
        asked = (
            select(DELIVERIES.c.number, DELIVERIES.c.job, DELIVERIES.c.attempts, JOBS.c.webhook)
            .join(JOBS, JOBS.c.id == DELIVERIES.c.job)
            .where(*due)
            .order_by(DELIVERIES.c.due)
            .limit(1)
        )
        with self._engine.connect() as database:  # without a lock, as this is asked all the time
            if database.execute(asked).first() is None:
                return None
        with self._store.writing() as database:
            locked = asked.with_for_update(skip_locked=True, of=DELIVERIES)
            row = database.execute(locked).one_or_none()
            if row is None:
                return None
            is_last = row.attempts >= len(PAUSES)
            pause = 0.0 if is_last else PAUSES[row.attempts]
            database.execute(
                update(DELIVERIES)
                .where(DELIVERIES.c.number == row.number)
                .values(
                    attempts=row.attempts + 1, due=self._clock() + pause,
                    state=DeliveryState.GIVEN_UP if is_last else DeliveryState.WAITING,
                )
            )  # fmt: skip
        return Delivery(row.number, row.job, row.webhook, is_last)

    def done(self, delivery: Delivery) -> None:
        """The delivery has arrived."""
        self._write(delivery, state=DeliveryState.DELIVERED, reason="")

    def failed(self, delivery: Delivery, reason: str) -> None:
        """An attempt has failed; it is tried again unless it was the last."""
        self._write(delivery, reason=reason)

    def _write(self, delivery: Delivery, **values: str) -> None:
        with self._store.writing() as database:
            mine = DELIVERIES.c.number == delivery.number
            database.execute(update(DELIVERIES).where(mine).values(**values))


MOST_ATTEMPTS = 3  # times that a job's own process may end without an answer
LOSS_PAUSES = (0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0)  # seconds after each loss


class JobLeaseLostError(Exception):
    """Another worker has the job, or it has ended: what this one has found does not count."""


class Queue:
    """The queue of a store."""

    def __init__(self, store: ServiceStore) -> None:
        self.store = store
        self._engine, self._clock = store.engine, store.clock

    def claim(self, worker: str, lease_seconds: float) -> ServiceJob | None:
        """The next job for a worker: of the highest priority, of who has the fewest running."""
        if not self._any(*self._waiting()):
            return None
        with self.store.writing() as database:
            now = self._clock()
            running = (
                select(JOBS.c.user, func.count().label("count"))
                .where(JOBS.c.state == State.SOLVING)
                .group_by(JOBS.c.user)
                .subquery()
            )
            asked = (
                select(JOBS.c.id)
                .outerjoin(running, running.c.user == JOBS.c.user)
                .where(*self._waiting())
                .order_by(JOBS.c.priority.desc(), func.coalesce(running.c.count, 0), JOBS.c.created)
                .limit(1)
                .with_for_update(skip_locked=True, of=JOBS)
            )
            job = database.execute(asked).scalar_one_or_none()
            if job is None:
                return None
            database.execute(
                update(JOBS)
                .where(JOBS.c.id == job)
                .values(
                    state=State.SOLVING, worker=worker, leased_until=now + lease_seconds,
                    attempts=JOBS.c.attempts + 1, started=now, asked=None,
                )
            )  # fmt: skip
            self._tell(database, job, State.SOLVING)
        return self.store.get(job)

    def renew(self, job: str, worker: str, lease_seconds: float) -> JobEnding | None:
        """Renew a lease; what the user asks of the job.

        Raises
        ------
        JobLeaseLostError
            If this worker does not have it any more.
        """
        with self.store.writing() as database:
            self._write(database, job, worker, leased_until=self._clock() + lease_seconds)
            asked = database.execute(select(JOBS.c.asked).where(JOBS.c.id == job)).scalar_one()
        return None if asked is None else JobEnding(asked)

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
            least, highest = self._known(database, job)
            kept: dict[str, Any] = {"bound": highest}
            if plans is None:
                kept["bound"] = _higher(highest, bound)
            elif least is None or (cost is not None and cost <= least):
                kept["bound"] = bound
            if document is not None and (least is None or cost is None or cost < least):
                # An answer that an earlier attempt gave is of another plan.
                kept |= {"cost": cost, "document": document, "answer": None}
            self._write(database, job, worker, **kept)
            news = {"cost": cost, "bound": bound, "plans": plans}
            self._tell(database, job, "progress", news | ({"doing": doing} if doing else {}))

    def finish(self, job: str, worker: str, outcome: JobEnd) -> None:
        """Store how a job ended; raises JobLeaseLostError as `renew`.

        A cost, bound or document that the outcome lacks, or that is worse, stays that of the best
        answer so far.
        """
        with self.store.writing() as database:
            self._end(database, job, outcome, JOBS.c.worker == worker)

    def give_back(self, job: str, worker: str, reason: str, *, counted: bool) -> None:
        """Queue a claimed job again, at once; raises JobLeaseLostError as `renew`.

        Its best answer so far is kept. ``counted``: as one of its own attempts. One that was asked
        to end ends.
        """
        with self.store.writing() as database:
            mine = select(JOBS).where(*_held(job, worker))
            row = database.execute(mine.with_for_update()).one_or_none()
            if row is None:
                raise JobLeaseLostError(job)
            if row.asked is not None:
                self._end_with_best(database, row, StoppedBy.USER, reason)
                return
            self._queue_again(database, row, reason, attempts=row.attempts - (not counted))

    def expire(self) -> int:
        """End the leases that have run out: jobs are queued again, or end; how many there were."""
        if not self._any(*self._overdue()):
            return 0
        with self.store.writing() as database:
            lost = database.execute(
                select(JOBS).where(*self._overdue()).with_for_update(skip_locked=True)
            ).all()
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

    def _lose(self, database: Connection, row: Row[Any]) -> None:
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

    def _queue_again(self, database: Connection, row: Row[Any], reason: str, **values: Any) -> None:
        values |= {"state": State.QUEUED, "worker": None, "leased_until": None}
        database.execute(update(JOBS).where(JOBS.c.id == row.id).values(values))
        self._tell(database, row.id, State.QUEUED, {"reason": reason})

    def _end_with_best(
        self, database: Connection, row: Row[Any], by: StoppedBy, reason: str
    ) -> None:
        kept = row.document is not None and row.asked != JobEnding.ABORT
        state = State.FEASIBLE if kept else State.FAILED
        self._end(database, row.id, JobEnd(state, reason=reason, stopped_by=by))

    def _end(self, database: Connection, job: str, outcome: JobEnd, *held: Any) -> None:
        values = _changes(self._known(database, job)[0], outcome)
        changed = database.execute(
            update(JOBS)
            .where(JOBS.c.id == job, JOBS.c.state == State.SOLVING, *held)
            .values(
                state=outcome.state, stopped_by=outcome.stopped_by,
                reason=outcome.reason.replace("\0", ""),  # which PostgreSQL refuses
                finished=self._clock(), worker=None, leased_until=None, **values,
            )
        ).rowcount  # fmt: skip
        if not changed:
            raise JobLeaseLostError(job)
        self._tell(database, job, outcome.state, {"stopped_by": outcome.stopped_by})

    def _known(self, database: Connection, job: str) -> tuple[float | None, float | None]:
        """Cost and bound of the best answer so far."""
        asked = select(JOBS.c.cost, JOBS.c.bound).where(JOBS.c.id == job)
        row = database.execute(asked).one_or_none()
        if row is None:
            raise JobLeaseLostError(job)
        return row.cost, row.bound

    def _write(self, database: Connection, job: str, worker: str, **values: Any) -> None:
        held = update(JOBS).where(*_held(job, worker))
        if not database.execute(held.values(**values)).rowcount:
            raise JobLeaseLostError(job)

    def _tell(
        self, database: Connection, job: str, name: str, data: dict[str, Any] | None = None
    ) -> None:
        tell(database, self._clock(), job, name, data)


def _held(job: str, worker: str) -> tuple[ColumnElement[bool], ...]:
    """That a worker has the lease of a job."""
    return (JOBS.c.id == job, JOBS.c.state == State.SOLVING, JOBS.c.worker == worker)


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
