"""Users' shares of the workers; of each job its time limit, and what it was when it gave way."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add table and columns; users of before have used nothing."""
    zero = sa.text("0")
    op.create_table(
        "shares",
        sa.Column("user", sa.String(200), primary_key=True),
        sa.Column("weight", sa.Float, nullable=False),
        sa.Column("virtual_seconds", sa.Float, nullable=False),
        sa.Column("since", sa.Float, nullable=False),
    )
    op.execute('INSERT INTO shares SELECT DISTINCT "user", 1, 0, 0 FROM jobs')
    op.add_column("jobs", sa.Column("limit_seconds", sa.Float))
    op.add_column("jobs", sa.Column("spent_seconds", sa.Float, nullable=False, server_default=zero))
    op.add_column("jobs", sa.Column("spared", sa.Integer, nullable=False, server_default=zero))
    op.drop_index("waiting", "jobs")
    op.create_index("waiting", "jobs", ["state", "user", "priority", "created"])
