"""The tables of the planning service's store; each change of them is a revision in migrations/."""

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

TABLES = MetaData()
# SQLite counts up only what it calls an integer; AUTOINCREMENT never uses a number again.
_NUMBER = BigInteger().with_variant(Integer, "sqlite")

JOBS = Table(
    "jobs",
    TABLES,
    Column("id", String(32), primary_key=True),
    Column("kind", String(40), nullable=False),
    Column("user", String(200), nullable=False),
    Column("state", String(12), nullable=False),
    Column("request", Text, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Column("started", Float),
    Column("finished", Float),
    Column("stopped_by", String(8)),
    Column("asked", String(8)),
    Column("attempts", Integer, nullable=False),
    Column("cost", Float),
    Column("bound", Float),
    Column("answer", Text),
    Column("document", Text),
    Column("reason", Text, nullable=False),
    Column("cached_from", String(32)),
    Column("idempotency_key", String(200)),
    Column("worker", String(64)),
    Column("leased_until", Float),
    Column("title", String(200), nullable=False, server_default=text("''")),
    Column("webhook", String(2000)),
    UniqueConstraint("user", "idempotency_key", name="once"),
    Index("waiting", "state", "priority", "created"),
    Index("alike", "digest", "state"),
    Index("of_user", "user", "created", "id"),
)

EVENTS = Table(
    "events",
    TABLES,
    Column("number", _NUMBER, primary_key=True, autoincrement=True),
    Column("job", String(32), ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    Column("at", Float, nullable=False),
    Column("name", String(20), nullable=False),
    Column("data", Text, nullable=False),
    Index("of_job", "job", "number"),
    sqlite_autoincrement=True,
)

TOKENS = Table(
    "tokens",
    TABLES,
    Column("digest", String(64), primary_key=True),
    Column("user", String(200), nullable=False),
    Column("scope", String(8), nullable=False),
    Column("created", Float, nullable=False),
)

UPLOADS = Table(
    "uploads",
    TABLES,
    Column("id", String(64), nullable=False),  # the SHA-256 of the canonical document
    Column("user", String(200), nullable=False),
    Column("kind", String(20), nullable=False),
    Column("name", String(200), nullable=False),
    Column("document", Text, nullable=False),
    Column("created", Float, nullable=False),
    PrimaryKeyConstraint("user", "id"),
)

DELIVERIES = Table(
    "deliveries",
    TABLES,
    Column("number", _NUMBER, primary_key=True, autoincrement=True),
    Column("job", String(32), ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    Column("state", String(12), nullable=False),
    Column("due", Float, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("reason", Text, nullable=False, server_default=text("''")),
    Index("due", "state", "due"),
    Index("delivery_of_job", "job"),
    sqlite_autoincrement=True,
)
