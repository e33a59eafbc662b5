"""The database of jobs: its tables and their revision, rows as jobs, events and transactions.

Each change of a table is a revision in ``migrations/``.
"""

import base64
import json
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry

from stagewright.service.jobs.records import (
    ENDED,
    DeliveryRecord,
    DeliveryState,
    JobEnding,
    ServiceJob,
    State,
    StoppedBy,
)
from stagewright.service.tracing import note

FIRST = "0001"  # of stores that were made before there were revisions
_LOCK = 0x5354_4147  # names the lock of PostgreSQL's: any number that no one else takes
_ALONE = threading.Lock()  # Alembic keeps what it works on in global variables


class NewerStoreError(Exception):
    """The store has a revision that this version of the code does not know: one line says which."""


def migrate(engine: sa.Engine) -> None:
    """Make the tables of an empty database, and bring older ones up to date.

    Servers that start at once wait for the one that does it.

    Raises
    ------
    NewerStoreError
        If a later version has migrated it.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    scripts = ScriptDirectory.from_config(config)
    with engine.connect() as database:
        if _revision(database) == scripts.get_current_head():
            return
    with _ALONE, writing(engine) as database:
        if engine.dialect.name == "postgresql":
            database.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        config.attributes["connection"] = database
        _upgrade(database, config, scripts)


def _upgrade(database: sa.Connection, config: Config, scripts: ScriptDirectory) -> None:
    found, known = _revision(database), [one.revision for one in scripts.walk_revisions()]
    if found is None and sa.inspect(database).has_table("jobs"):
        command.stamp(config, FIRST)
    elif found is not None and found not in known:
        raise NewerStoreError(
            f"a newer version of Stagewright made its tables (revision {found}, this version "
            f"knows {known[0]} at most): use that version"
        )
    command.upgrade(config, "head")


def _revision(database: sa.Connection) -> str | None:
    return MigrationContext.configure(database).get_current_revision()


_PACKED = "zlib:"  # no JSON text begins so
_SHORT = 4096  # characters that are stored as they are


class _Packed(sa.types.TypeDecorator[str]):
    """A JSON text; a long one is compressed."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        """The text as it is stored."""
        if value is None or len(value) <= _SHORT:
            return value
        return _PACKED + base64.b85encode(zlib.compress(value.encode(), 1)).decode()

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> str | None:
        """The stored text."""
        if value is None or not value.startswith(_PACKED):
            return value
        return zlib.decompress(base64.b85decode(value[len(_PACKED) :])).decode()


TABLES = sa.MetaData()
# SQLite counts up only what it calls an integer; AUTOINCREMENT never uses a number again.
_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")

JOBS = sa.Table(
    "jobs",
    TABLES,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("kind", sa.String(40), nullable=False),
    sa.Column("user", sa.String(200), nullable=False),
    sa.Column("state", sa.String(12), nullable=False),
    sa.Column("request", _Packed, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("started", sa.Float),
    sa.Column("finished", sa.Float),
    sa.Column("stopped_by", sa.String(8)),
    sa.Column("asked", sa.String(8)),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("losses", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("due", sa.Float, nullable=False, server_default=sa.text("0")),
    sa.Column("cost", sa.Float),
    sa.Column("bound", sa.Float),
    sa.Column("answer", _Packed),
    sa.Column("document", _Packed),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("cached_from", sa.String(32)),
    sa.Column("idempotency_key", sa.String(200)),
    sa.Column("worker", sa.String(64)),
    sa.Column("leased_until", sa.Float),
    sa.Column("title", sa.String(200), nullable=False, server_default=sa.text("''")),
    sa.Column("webhook", sa.String(2000)),
    sa.Column("user_class", sa.String(40)),
    sa.Column("trace", sa.String(55)),  # a traceparent (W3C Trace Context)
    sa.Column("limit_seconds", sa.Float),  # that it asks for
    sa.Column("spent_seconds", sa.Float, nullable=False, server_default=sa.text("0")),
    # It has given way, and has found nothing better since.
    sa.Column("spared", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.UniqueConstraint("user", "idempotency_key", name="once"),
    sa.Index("waiting", "state", "user", "priority", "created"),
    sa.Index("alike", "digest", "state"),
    sa.Index("of_user", "user", "created", "id"),
    sa.Index("spent", "user", "state", "started", "finished"),
)

EVENTS = sa.Table(
    "events",
    TABLES,
    sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
    sa.Column("job", sa.String(32), sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("name", sa.String(20), nullable=False),
    sa.Column("data", sa.Text, nullable=False),
    sa.Index("of_job", "job", "number"),
    sqlite_autoincrement=True,
)

SHARES = sa.Table(
    "shares",
    TABLES,
    sa.Column("user", sa.String(200), primary_key=True),
    sa.Column("weight", sa.Float, nullable=False),
    sa.Column("virtual_seconds", sa.Float, nullable=False),
    sa.Column("since", sa.Float, nullable=False),  # when the user began to wait
)

TOKENS = sa.Table(
    "tokens",
    TABLES,
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("user", sa.String(200), nullable=False),
    sa.Column("scope", sa.String(8), nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("expires", sa.Float),
    sa.Column("used", sa.Float),
)

UPLOADS = sa.Table(
    "uploads",
    TABLES,
    sa.Column("id", sa.String(64), nullable=False),  # the SHA-256 of the canonical document
    sa.Column("user", sa.String(200), nullable=False),
    sa.Column("kind", sa.String(20), nullable=False),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("document", _Packed, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.PrimaryKeyConstraint("user", "id"),
)

DELIVERIES = sa.Table(
    "deliveries",
    TABLES,
    sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
    sa.Column("job", sa.String(32), sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    sa.Column("state", sa.String(12), nullable=False),
    sa.Column("due", sa.Float, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("reason", sa.Text, nullable=False, server_default=sa.text("''")),
    sa.Index("due", "state", "due"),
    sa.Index("delivery_of_job", "job"),
    sqlite_autoincrement=True,
)

WORKERS = sa.Table(
    "workers",
    TABLES,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("began", sa.Float, nullable=False),
    sa.Column("seen", sa.Float, nullable=False),
    sa.Column("resident_bytes", sa.Float, nullable=False),
)


# How long a transaction waits for one of this process, then for one of another: together less than
# a worker's lease.
LOCK_SECONDS = 7.0
CONNECT_SECONDS = 10  # how long PostgreSQL may take to answer
CHANNEL = "stagewright_events"  # of PostgreSQL's notices: the job of an event, and its name
CONNECTIONS = 15  # of a store, kept open, besides the one that hears of events
_FIELDS = tuple(ServiceJob.__dataclass_fields__)
_DELIVERY = {name: f"delivery_{name}" for name in DeliveryRecord.__dataclass_fields__}
_ORIGIN = JOBS.alias("origin")
WHOLE = (
    sa.select(
        JOBS,
        _ORIGIN.c.user.label("cached_user"),
        *(DELIVERIES.c[name].label(label) for name, label in _DELIVERY.items()),
    )
    .outerjoin(_ORIGIN, _ORIGIN.c.id == JOBS.c.cached_from)
    .outerjoin(DELIVERIES, DELIVERIES.c.job == JOBS.c.id)
)
"""Jobs with all that `job_of` reads."""


def job_of(values: Mapping[str, Any]) -> ServiceJob:
    """The job of the fields of a row; those that are not given are empty."""
    fields = {name: values.get(name) for name in _FIELDS}
    fields["state"] = State(values["state"])
    fields["stopped_by"] = fields["stopped_by"] and StoppedBy(fields["stopped_by"])
    fields["asked"] = fields["asked"] and JobEnding(fields["asked"])
    fields["delivery"] = _delivery_of(values, fields["webhook"], fields["state"] in ENDED)
    return ServiceJob(**fields)  # type: ignore[arg-type]


def _delivery_of(
    values: Mapping[str, Any], webhook: str | None, has_ended: bool
) -> DeliveryRecord | None:
    told: dict[str, Any] = {name: values.get(label) for name, label in _DELIVERY.items()}
    if told["state"] is not None:
        return DeliveryRecord(**told | {"state": DeliveryState(told["state"])})
    # None of a job that has ended, or not: it was delivered before that was kept, or is not due.
    return None if webhook is None or has_ended else DeliveryRecord(DeliveryState.WAITING)


def newest(
    asked: sa.Select[Any], table: sa.Table, limit: int, last: tuple[float, str] | None
) -> sa.Select[Any]:
    """The newest rows that are asked for, from before the one of that time and id on."""
    order = table.c.created, table.c.id
    asked = asked.order_by(*(one.desc() for one in order)).limit(limit)
    return asked if last is None else asked.where(sa.tuple_(*order) < last)


def tell(
    database: sa.Connection, at: float, job: str, name: str, data: dict[str, Any] | None = None
) -> None:
    """Add an event to a job's history; PostgreSQL sends notice of it at the commit.

    The event of its end makes the delivery of its webhook due, if it has one.
    """
    note("job", job=job, event=name, **(data or {}))
    if name in ENDED:
        _announce(database, at, job)
    values = {"job": job, "at": at, "name": name, "data": json.dumps(data or {})}
    if database.dialect.name == "sqlite":
        database.execute(sa.insert(EVENTS), values)
        return
    written = (EVENTS.c.job + " " + EVENTS.c.name).label("event")
    told = sa.insert(EVENTS).values(values).returning(written).cte()
    database.execute(sa.select(sa.func.pg_notify(CHANNEL, told.c.event)))


def _announce(database: sa.Connection, at: float, job: str) -> None:
    hooked = sa.select(
        JOBS.c.id, sa.literal(DeliveryState.WAITING), sa.literal(at), sa.literal(0)
    ).where(JOBS.c.id == job, JOBS.c.webhook.is_not(None))
    columns = ["job", "state", "due", "attempts"]
    database.execute(sa.insert(DELIVERIES).from_select(columns, hooked))


def engine_of(url: str) -> sa.Engine:
    """The database of a URL; of SQLite one that several processes read while one writes."""
    remote = not url.startswith("sqlite")  # then a connection may have been lost unnoticed
    patience = {"connect_timeout": CONNECT_SECONDS} if url.startswith("postgresql") else {}
    engine = sa.create_engine(
        url, pool_pre_ping=remote, pool_size=CONNECTIONS, max_overflow=0, connect_args=patience
    )
    if engine.dialect.name == "sqlite":
        _prepare_connections(engine)
        if engine.url.database not in (None, "", ":memory:"):
            _watch_file(engine, Path(engine.url.database))
    return engine


def _prepare_connections(engine: sa.Engine) -> None:
    @sa.event.listens_for(engine, "connect")
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


def _watch_file(engine: sa.Engine, path: Path) -> None:
    """Refuse to use a database file that was deleted; connect again if it was replaced."""
    opened = threading.Event()

    @sa.event.listens_for(engine, "do_connect")
    def require_file(*_: Any) -> None:
        if opened.is_set() and _inode(path) is None:
            raise sqlite3.OperationalError(f"{path} was deleted")

    @sa.event.listens_for(engine, "connect")
    def remember(_: Any, record: ConnectionPoolEntry) -> None:
        record.info["inode"] = _inode(path)
        opened.set()

    @sa.event.listens_for(engine, "checkout")
    def compare(_: Any, record: ConnectionPoolEntry, __: Any) -> None:
        if _inode(path) != record.info["inode"]:
            raise DisconnectionError(f"{path} was deleted or replaced")


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


@contextmanager
def writing(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A transaction that writes.

    SQLite's lock for writing is taken now, not after reading, which could end in a deadlock.
    """
    with engine.begin() as database:
        if engine.dialect.name == "sqlite":
            database.execute(sa.text("BEGIN IMMEDIATE"))
        yield database
