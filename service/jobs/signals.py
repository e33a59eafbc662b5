"""What wakes those who wait in this process when something happens to a job, in any process."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, func, select
from sqlalchemy.exc import SQLAlchemyError

from stagewright.service.jobs.rows import CHANNEL, EVENTS

LOOK_SECONDS = 0.2  # between looks for events that other processes have written, in SQLite
_RETRY_SECONDS = 1.0  # after an error; how late the thread may end, too
_Wake = Callable[[], None]


class Signals:
    """Wakes threads and tasks when a job of the store has a new event.

    One thread per store hears of events: PostgreSQL sends notices; in SQLite it looks for them, at
    once after a transaction of this process. It starts with the first who waits. A wake-up may be
    for nothing; whoever waits looks now and then without one, since notices may be lost with a
    connection.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._notifies = engine.dialect.name == "postgresql"
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str | None, str | None], list[_Wake]] = defaultdict(list)
        self._new, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def subscribed(
        self, wake: _Wake, *, job: str | None = None, name: str | None = None
    ) -> Iterator[None]:
        """Call ``wake``, in another thread, after events of that job, that name, or both."""
        with self._lock:
            self._waiting[job, name].append(wake)
            if self._thread is None:
                self._thread = threading.Thread(target=self._listen, daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._waiting[job, name].remove(wake)
                if not self._waiting[job, name]:
                    del self._waiting[job, name]

    def look(self) -> None:
        """Look for events now: this process has written."""
        self._new.set()

    def close(self) -> None:
        """End the thread; of PostgreSQL, it ends by itself a little later."""
        self._closed.set()
        self._new.set()
        if self._thread is not None and not self._notifies:
            self._thread.join()

    def _listen(self) -> None:
        errors = (SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error)
        while not self._closed.is_set():
            try:
                for job, name in self._noticed() if self._notifies else self._found():
                    self._wake(job, name)
            except errors:
                self._closed.wait(_RETRY_SECONDS)

    def _noticed(self) -> Iterator[tuple[str | None, str | None]]:
        """Job and name of each new event, by notices of PostgreSQL; None, None: any event."""
        with self._engine.connect() as database:
            database.execution_options(isolation_level="AUTOCOMMIT")
            database.detach()  # the pool would give the connection to others
            database.exec_driver_sql(f"LISTEN {CHANNEL}")
            driver: Any = database.connection.dbapi_connection
            yield None, None
            while not self._closed.is_set():
                for notice in driver.notifies(timeout=_RETRY_SECONDS, stop_after=1):
                    job, _, name = notice.payload.partition(" ")
                    yield job, name

    def _found(self) -> Iterator[tuple[str | None, str | None]]:
        """The job and name of each new event, read from SQLite in the order of their numbers."""
        with self._engine.connect() as database:
            last = database.execute(select(func.max(EVENTS.c.number))).scalar() or 0
        yield None, None
        while not self._closed.is_set():
            self._new.wait(LOOK_SECONDS)
            self._new.clear()
            new = select(EVENTS.c.number, EVENTS.c.job, EVENTS.c.name).order_by(EVENTS.c.number)
            with self._engine.connect() as database:
                rows = database.execute(new.where(EVENTS.c.number > last)).all()
            for number, job, name in rows:
                last = number
                yield job, name

    def _wake(self, job: str | None, name: str | None) -> None:
        with self._lock:
            if job is None:
                woken = [wake for waiting in self._waiting.values() for wake in waiting]
            else:
                keys = ((job, None), (None, name), (job, name))
                woken = [wake for key in keys for wake in self._waiting.get(key, ())]
        for wake in woken:
            wake()
