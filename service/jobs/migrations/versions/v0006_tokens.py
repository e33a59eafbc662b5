"""Tokens expire, and are known to be used."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add both times; tokens of before do not expire."""
    op.add_column("tokens", sa.Column("expires", sa.Float))
    op.add_column("tokens", sa.Column("used", sa.Float))
