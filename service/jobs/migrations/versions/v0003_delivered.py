"""Deliveries of webhooks are kept when they have arrived, with how their last attempt ended."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the column, and indexes for a table that grows."""
    op.add_column(
        "deliveries", sa.Column("reason", sa.Text, nullable=False, server_default=sa.text("''"))
    )
    op.drop_index("due", "deliveries")
    op.create_index("due", "deliveries", ["state", "due"])
    op.create_index("delivery_of_job", "deliveries", ["job"])
