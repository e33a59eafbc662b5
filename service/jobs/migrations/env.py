"""What Alembic runs: the revisions asked for, in the transaction of the connection it is given."""

from alembic import context

from stagewright.service.jobs.rows import TABLES

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=TABLES,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
