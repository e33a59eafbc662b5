"""Deliveries of webhooks: who is to be told that a job has ended, and when it is tried again."""

from dataclasses import dataclass

from sqlalchemy import select, update

from stagewright.service.jobs.records import DeliveryState
from stagewright.service.jobs.rows import DELIVERIES, JOBS
from stagewright.service.jobs.store import JobStore

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

    def __init__(self, store: JobStore) -> None:
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
