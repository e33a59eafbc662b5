"""What the store and its queue have in common: rows as jobs, events, transactions that write."""

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Connection,
    Engine,
    Select,
    Table,
    create_engine,
    event,
    func,
    insert,
    literal,
    select,
    text,
    tuple_,
)
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry

from stagewright.service.jobs.records import (
    ENDED,
    Asked,
    DeliveryRecord,
    DeliveryState,
    Job,
    State,
    StoppedBy,
)
from stagewright.service.jobs.tables import DELIVERIES, EVENTS, JOBS

# How long a transaction waits for one of this process, then for one of another: together less than
# a worker's lease.
LOCK_SECONDS = 7.0
CONNECT_SECONDS = 10  # how long PostgreSQL may take to answer
CHANNEL = "stagewright_events"  # of PostgreSQL's notices: the job of an event, and its name
CONNECTIONS = 15  # of a store, kept open, besides the one that hears of events
_FIELDS = tuple(Job.__dataclass_fields__)
_DELIVERY = {name: f"delivery_{name}" for name in DeliveryRecord.__dataclass_fields__}
_ORIGIN = JOBS.alias("origin")
WHOLE = (
    select(
        JOBS,
        _ORIGIN.c.user.label("cached_user"),
        *(DELIVERIES.c[name].label(label) for name, label in _DELIVERY.items()),
    )
    .outerjoin(_ORIGIN, _ORIGIN.c.id == JOBS.c.cached_from)
    .outerjoin(DELIVERIES, DELIVERIES.c.job == JOBS.c.id)
)
"""Jobs with all that `job_of` reads."""


def job_of(values: Mapping[str, Any]) -> Job:
    """The job of the fields of a row; those that are not given are empty."""
    fields = {name: values.get(name) for name in _FIELDS}
    fields["state"] = State(values["state"])
    fields["stopped_by"] = fields["stopped_by"] and StoppedBy(fields["stopped_by"])
    fields["asked"] = fields["asked"] and Asked(fields["asked"])
    fields["delivery"] = _delivery_of(values, fields["webhook"], fields["state"] in ENDED)
    return Job(**fields)  # type: ignore[arg-type]


def _delivery_of(
    values: Mapping[str, Any], webhook: str | None, has_ended: bool
) -> DeliveryRecord | None:
    told: dict[str, Any] = {name: values.get(label) for name, label in _DELIVERY.items()}
    if told["state"] is not None:
        return DeliveryRecord(**told | {"state": DeliveryState(told["state"])})
    # None of a job that has ended, or not: it was delivered before that was kept, or is not due.
    return None if webhook is None or has_ended else DeliveryRecord(DeliveryState.WAITING)


def newest(
    asked: Select[Any], table: Table, limit: int, last: tuple[float, str] | None
) -> Select[Any]:
    """The newest rows that are asked for, from before the one of that time and id on."""
    order = table.c.created, table.c.id
    asked = asked.order_by(*(one.desc() for one in order)).limit(limit)
    return asked if last is None else asked.where(tuple_(*order) < last)


def tell(
    database: Connection, at: float, job: str, name: str, data: dict[str, Any] | None = None
) -> None:
    """Add an event to a job's history; PostgreSQL sends notice of it at the commit.

    The event of its end makes the delivery of its webhook due, if it has one.
    """
    if name in ENDED:
        _announce(database, at, job)
    values = {"job": job, "at": at, "name": name, "data": json.dumps(data or {})}
    if database.dialect.name == "sqlite":
        database.execute(insert(EVENTS), values)
        return
    written = (EVENTS.c.job + " " + EVENTS.c.name).label("event")
    told = insert(EVENTS).values(values).returning(written).cte()
    database.execute(select(func.pg_notify(CHANNEL, told.c.event)))


def _announce(database: Connection, at: float, job: str) -> None:
    hooked = select(JOBS.c.id, literal(DeliveryState.WAITING), literal(at), literal(0)).where(
        JOBS.c.id == job, JOBS.c.webhook.is_not(None)
    )
    columns = ["job", "state", "due", "attempts"]
    database.execute(insert(DELIVERIES).from_select(columns, hooked))


def engine_of(url: str) -> Engine:
    """The database of a URL; of SQLite one that several processes read while one writes."""
    remote = not url.startswith("sqlite")  # then a connection may have been lost unnoticed
    patience = {"connect_timeout": CONNECT_SECONDS} if url.startswith("postgresql") else {}
    engine = create_engine(
        url, pool_pre_ping=remote, pool_size=CONNECTIONS, max_overflow=0, connect_args=patience
    )
    if engine.dialect.name == "sqlite":
        _prepare_connections(engine)
        if engine.url.database not in (None, "", ":memory:"):
            _watch_file(engine, Path(engine.url.database))
    return engine


def _prepare_connections(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        # The driver would begin transactions late and by itself; here each begins when it is told.
        connection.isolation_level = None
        for pragma in (
            "journal_mode=WAL",  # readers and a writer do not wait for each other
            "synchronous=NORMAL",
            f"busy_timeout={int(LOCK_SECONDS * 1000)}",
            "foreign_keys=ON",
        ):
            connection.execute(f"PRAGMA {pragma}")


def _watch_file(engine: Engine, path: Path) -> None:
    """Refuse what would go to a file that was deleted, and take up one that took its place."""
    opened = threading.Event()

    @event.listens_for(engine, "do_connect")
    def require_file(*_: Any) -> None:
        if opened.is_set() and _inode(path) is None:
            raise sqlite3.OperationalError(f"{path} was deleted")

    @event.listens_for(engine, "connect")
    def remember(_: Any, record: ConnectionPoolEntry) -> None:
        record.info["inode"] = _inode(path)
        opened.set()

    @event.listens_for(engine, "checkout")
    def compare(_: Any, record: ConnectionPoolEntry, __: Any) -> None:
        if _inode(path) != record.info["inode"]:
            raise DisconnectionError(f"{path} was deleted or replaced")


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that writes.

    SQLite's lock for writing is taken now, not after reading, which could end in a deadlock.
    """
    with engine.begin() as database:
        if engine.dialect.name == "sqlite":
            database.execute(text("BEGIN IMMEDIATE"))
        yield database
