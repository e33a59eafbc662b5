"""Steps that a server repeats while it runs, such as deleting jobs that ended long ago."""

import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from stagewright.graphs.documents.errors import InputError
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.tracing import LOG


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
    """Copy a database, as it is at one moment, into a single file."""
    copy.touch(0o600)
    with closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=rw", uri=True)) as database:
        database.execute("SELECT count(*) FROM jobs, events, tokens LIMIT 0")  # is it a store?
        database.execute("VACUUM INTO ?", (str(copy),))
    with copy.open("rb+") as written:
        os.fsync(written.fileno())


@dataclass
class RepeatedStep:
    """Takes a step again and again until it is stopped, in a thread.

    After a step that tells that there was nothing to do, or that fails, it waits for ``seconds``,
    or until it is ``woken``.
    """

    step: Callable[[], bool]
    seconds: float
    stopping: threading.Event = field(default_factory=threading.Event)
    woken: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        """End `run` after the step that it takes."""
        self.stopping.set()
        self.woken.set()

    def run(self) -> None:
        """Repeat the step until it is stopped."""
        while not self.stopping.is_set():
            busy = False
            try:
                busy = self.step()
            except SQLAlchemyError:
                pass  # the store does not answer
            except Exception:  # a defect, which ends no thread
                LOG.exception("a step of a server failed")
            if not busy:
                self.woken.wait(self.seconds)
                self.woken.clear()


DAY = 86400.0
LOOK_SECONDS = 3600.0  # between looks for jobs that are old enough


def retention(store: ServiceStore, days: float) -> RepeatedStep:
    """Discards jobs so many days after their ends."""

    def discard() -> bool:
        store.discard_ended(store.clock() - days * DAY)
        return False

    return RepeatedStep(discard, LOOK_SECONDS)
