"""Lost servers are counted apart from a job's own attempts, and are paused after."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add both columns; jobs that wait are due at once."""
    zero = sa.text("0")
    op.add_column("jobs", sa.Column("losses", sa.Integer, nullable=False, server_default=zero))
    op.add_column("jobs", sa.Column("due", sa.Float, nullable=False, server_default=zero))
