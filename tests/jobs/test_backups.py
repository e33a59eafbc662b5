"""Backups that are made while jobs are submitted and solved, and stores that are made of them."""

import itertools
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from commands import answered, refused
from postgres import PostgreSQL

pytest.importorskip("alembic", reason="the service is not installed")

from stagewright.service.http import tokens
from stagewright.service.http.tokens import Scope, Tokens
from stagewright.service.jobs.queue import Queue
from stagewright.service.jobs.records import JobEnd, State
from stagewright.service.jobs.store import ServiceStore

DOCUMENT = "a plan " * 2000
TOKEN = "sw_known"


@contextmanager
def busy(store: ServiceStore) -> Iterator[list[str]]:
    """Jobs are submitted all the time, every second one answered; the ids of those accepted."""
    accepted: list[str] = []
    enough, ends = threading.Event(), threading.Event()

    def work() -> None:
        queue = Queue(store)
        for n in itertools.count():
            accepted.append(store.submit("ann", "plan", f'{{"n":{n}}}', key=f"{n}")[0].id)
            if n % 2 and (job := queue.claim("w", 60.0)) is not None and n % 4 == 1:
                done = JobEnd(State.OPTIMAL, answer="{}", document=DOCUMENT, cost=1.0)
                queue.finish(job.id, "w", done)
            if n == 40:
                enough.set()
            if ends.is_set():
                return

    thread = threading.Thread(target=work)
    thread.start()
    assert enough.wait(120)
    try:
        yield accepted
    finally:
        ends.set()
        thread.join()


def require_whole(url: str, before: list[str]) -> None:
    """What was accepted is there, readable; what was being solved is solved again."""
    restored = ServiceStore(url, clock=lambda: 4e9)  # all leases have run out
    for number, job in enumerate(before):
        found = restored.get(job)
        assert found is not None
        assert found.request == f'{{"n":{number}}}'
        assert (found.document == DOCUMENT) == (found.state is State.OPTIMAL)
        assert restored.events(job)[0].name == "queued"
    counts = restored.counts()
    assert counts[State.SOLVING]
    assert counts[State.OPTIMAL]
    queue = Queue(restored)
    assert queue.expire() == counts[State.SOLVING]
    claimed = 0
    while (job := queue.claim("v", 60.0)) is not None:
        queue.finish(job.id, "v", JobEnd(State.OPTIMAL, answer="{}"))
        claimed += 1
    assert claimed == counts[State.SOLVING] + counts[State.QUEUED]
    assert restored.submit("ann", "plan", '{"n":0}', key="0")[0].id == before[0]
    caller = Tokens(restored.engine).caller(TOKEN)
    assert caller is not None
    assert (caller.user, caller.scope) == ("ann", Scope.ADMIN)
    restored.close()


def backed_up(store: ServiceStore, make: Callable[[], object]) -> list[str]:
    """The jobs that were accepted before a backup of the busy store is made."""
    with patch.object(tokens.secrets, "token_urlsafe", lambda _: TOKEN.removeprefix("sw_")):
        assert Tokens(store.engine).create("ann", Scope.ADMIN) == TOKEN
    with busy(store) as accepted:
        before = list(accepted)
        make()
    assert len(accepted) >= len(before)
    store.close()
    return before


def test_a_backup_of_a_busy_store_is_a_store(tmp_path: Path) -> None:
    file, copy = tmp_path / "jobs.sqlite", tmp_path / "backup ä?.sqlite"
    store = ServiceStore(f"sqlite:///{file}")
    before = backed_up(store, lambda: answered("backup", copy, "--store", file))
    with closing(sqlite3.connect(copy)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert copy.stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in tmp_path.glob("backup*")) == [copy.name]
    assert not list(tmp_path.glob(".backup*"))
    # Restored in place of the store, whose log is not of the copy.
    for old in tmp_path.glob("jobs.sqlite*"):
        old.unlink()
    shutil.copy(copy, file)
    require_whole(f"sqlite:///{file}", before)


def test_backups_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    file, other = tmp_path / "jobs.sqlite", tmp_path / "other.sqlite"
    assert "there is no store" in refused("backup", other, "--store", file)
    assert not file.exists()
    ServiceStore(f"sqlite:///{file}").close()
    other.write_text("mine")
    assert "exists: name a new file" in refused("backup", other, "--store", file)
    assert other.read_text() == "mine"
    new = tmp_path / "new"
    assert "not a database" in refused("backup", new, "--store", other)
    with closing(sqlite3.connect(tmp_path / "empty")):
        pass
    assert "no such table: jobs" in refused("backup", new, "--store", tmp_path / "empty")
    assert "with pg_dump" in refused("backup", new, "--store", "postgresql+psycopg://x@localhost/y")
    assert "is a folder" in refused("backup", tmp_path, "--store", file)
    assert not new.exists()


@pytest.mark.slow
def test_a_dump_of_a_busy_postgresql_is_a_store(server: PostgreSQL, tmp_path: Path) -> None:
    url, dump = server.new_database(), tmp_path / "jobs.dump"

    def plain(url: str) -> str:
        return url.replace("+psycopg", "")

    def make() -> None:
        command = [server.bin / "pg_dump", "--format=custom", "--file", dump, plain(url)]
        subprocess.run(command, check=True)

    before = backed_up(ServiceStore(url), make)
    restored = server.new_database()
    command = [server.bin / "pg_restore", "--no-owner", "--exit-on-error", "--dbname"]
    subprocess.run([*command, plain(restored), dump], check=True)
    require_whole(restored, before)
