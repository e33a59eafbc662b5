"""Titles and webhooks of jobs, uploaded documents, deliveries of webhooks."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Add columns and tables; jobs of before have no title."""
    op.add_column(
        "jobs", sa.Column("title", sa.String(200), nullable=False, server_default=sa.text("''"))
    )
    op.add_column("jobs", sa.Column("webhook", sa.String(2000)))
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("user", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("user", "id"),
    )
    op.create_table(
        "deliveries",
        sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
        sa.Column(
            "job", sa.String(32), sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("due", sa.Float, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("due", "deliveries", ["due"])
