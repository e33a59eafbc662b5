"""Brings a store's tables to the revision that this version of the code works on."""

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect, text

from stagewright.service.jobs.rows import writing

FIRST = "0001"  # of stores that were made before there were revisions
_LOCK = 0x5354_4147  # names the lock of PostgreSQL's: any number that no one else takes
_ALONE = threading.Lock()  # Alembic keeps what it works on in global variables


class NewerStoreError(Exception):
    """The store has a revision that this version of the code does not know: one line says which."""


def migrate(engine: Engine) -> None:
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
            database.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        config.attributes["connection"] = database
        _upgrade(database, config, scripts)


def _upgrade(database: Connection, config: Config, scripts: ScriptDirectory) -> None:
    found, known = _revision(database), [one.revision for one in scripts.walk_revisions()]
    if found is None and inspect(database).has_table("jobs"):
        command.stamp(config, FIRST)
    elif found is not None and found not in known:
        raise NewerStoreError(
            f"a newer version of Stagewright made its tables (revision {found}, this version "
            f"knows {known[0]} at most): use that version"
        )
    command.upgrade(config, "head")


def _revision(database: Connection) -> str | None:
    return MigrationContext.configure(database).get_current_revision()
