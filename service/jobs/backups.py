"""Backups of a store of SQLite, made while servers work on it."""

import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from stagewright.graphs.documents.errors import InputError


def back_up(url: str, target: Path) -> None:
    """Write all that the store holds now into a new file, itself a store.

    Nobody waits for it. The file appears when it is complete; only its owner may read it.

    Raises
    ------
    InputError
        If there is no such store of SQLite, or the file exists or cannot be written.
    """
    source = _file(url)
    if target.exists():
        raise InputError(f"{target} exists: name a new file")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".backup-") as folder:
        copy = Path(folder) / target.name
        try:
            _copy(source, copy)
            os.link(copy, target)  # unlike a rename, refuses to overwrite
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"{source}: no backup can be made as {target}: {error}") from None


def _file(url: str) -> Path:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise InputError(f"{url} is no URL of a store") from None
    if parsed.get_backend_name() != "sqlite":
        raise InputError("only a store of SQLite is a file: back up PostgreSQL with pg_dump")
    source = Path(parsed.database or "")
    if not source.is_file():
        raise InputError(f"{source}: there is no store")
    return source


def _copy(source: Path, copy: Path) -> None:
    """A copy of one moment, in one file without a log beside it."""
    copy.touch(0o600)
    with closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=rw", uri=True)) as database:
        database.execute("SELECT count(*) FROM jobs, events, tokens LIMIT 0")  # is it a store?
        database.execute("VACUUM INTO ?", (str(copy),))
    with copy.open("rb+") as written:
        os.fsync(written.fileno())
