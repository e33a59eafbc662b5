"""Who submitted a job in which trace, and the workers that are there."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add columns, a table and an index; of jobs of before neither class nor trace is known."""
    op.add_column("jobs", sa.Column("user_class", sa.String(40)))
    op.add_column("jobs", sa.Column("trace", sa.String(55)))
    op.create_index("spent", "jobs", ["user", "state", "started", "finished"])
    op.create_table(
        "workers",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("began", sa.Float, nullable=False),
        sa.Column("seen", sa.Float, nullable=False),
        sa.Column("resident_bytes", sa.Float, nullable=False),
    )
