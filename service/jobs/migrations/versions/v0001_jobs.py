"""Jobs, their events, and tokens."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Make the first tables."""
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("user", sa.String(200), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("started", sa.Float),
        sa.Column("finished", sa.Float),
        sa.Column("stopped_by", sa.String(8)),
        sa.Column("asked", sa.String(8)),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("cost", sa.Float),
        sa.Column("bound", sa.Float),
        sa.Column("answer", sa.Text),
        sa.Column("document", sa.Text),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("cached_from", sa.String(32)),
        sa.Column("idempotency_key", sa.String(200)),
        sa.Column("worker", sa.String(64)),
        sa.Column("leased_until", sa.Float),
        sa.UniqueConstraint("user", "idempotency_key", name="once"),
    )
    op.create_index("waiting", "jobs", ["state", "priority", "created"])
    op.create_index("alike", "jobs", ["digest", "state"])
    op.create_index("of_user", "jobs", ["user", "created", "id"])
    op.create_table(
        "events",
        sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
        sa.Column(
            "job", sa.String(32), sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("name", sa.String(20), nullable=False),
        sa.Column("data", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("of_job", "events", ["job", "number"])
    op.create_table(
        "tokens",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("user", sa.String(200), nullable=False),
        sa.Column("scope", sa.String(8), nullable=False),
        sa.Column("created", sa.Float, nullable=False),
    )
