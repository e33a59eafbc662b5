"""Disks and databases that fail under a server: clear errors, no corruption, and recovery."""

import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from commands import refused
from planning_jobs import TWO_JOBS, long_request
from postgres import PostgreSQL, postgres_server
from processes import PATIENCE, small_disk

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

import httpx
from fastapi.testclient import TestClient
from killed_service import require_free, require_told, serving

from stagewright.client import Client, ServiceError
from stagewright.service.http.app import create_app
from stagewright.service.http.guard import Service
from stagewright.service.jobs import rows
from stagewright.service.jobs.store import ServiceStore

T = TypeVar("T")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.sqlite"


@contextmanager
def asked(path: Path) -> Iterator[TestClient]:
    """An application on a store of SQLite, without workers."""
    store = ServiceStore(f"sqlite:///{path}")
    app = create_app(Service(store, open_to_all=True))
    try:
        with TestClient(app, base_url="http://127.0.0.1") as client:
            yield client
    finally:
        store.close()


def require_unavailable(response: httpx.Response) -> None:
    """A problem of one line that says when to try again."""
    assert response.status_code == 503, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert float(response.headers["retry-after"]) > 0
    assert response.json()["detail"] == "the store does not answer; try again"


def submit(client: TestClient, number: int, name: str = "") -> httpx.Response:
    text = TWO_JOBS.replace("]]]}", f']]], "seed": {number}}}')
    return client.post("/v1/jobshop", content=text, headers={"Idempotency-Key": name})


# --- At the start ------------------------------------------------------------------------------


def damaged(path: Path) -> None:
    with closing(ServiceStore(f"sqlite:///{path}")) as store:
        for number in range(50):
            store.submit("ann", "plan", str(number) * 3000)
    content = bytearray(path.read_bytes())
    content[4096 : 4096 * 30] = b"\x55" * (4096 * 29)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_bytes(b"no database " * 1000), "file is not a database"),
        (Path.mkdir, "unable to open database file"),
        (damaged, "database disk image is malformed"),
    ],
)
def test_a_server_does_not_start_on_what_is_no_store(
    path: Path, make: Callable[[Path], object], said: str
) -> None:
    make(path)
    told = refused("serve", "--port", 0, "--workers", 0, "--store", path)
    assert said in told
    assert str(path) in told


# --- Under a server ----------------------------------------------------------------------------


def test_a_full_disk_loses_nothing_and_is_said(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 200), asked(disk / "jobs.sqlite") as client:
        first = submit(client, 0, "first").json()["id"]
        (disk / "other").write_bytes(b"\0" * _free(disk))
        accepted, number = [first], 0
        while (response := submit(client, number := number + 1, f"key {number}")).is_success:
            accepted.append(response.json()["id"])
        require_unavailable(response)
        assert client.get("/health/live").status_code == 200
        assert client.get(f"/v1/jobs/{first}").json()["state"] == "queued"
        (disk / "other").unlink()
        again = submit(client, number, f"key {number}")
        assert again.is_success
        for job in [*accepted, again.json()["id"]]:
            assert client.get(f"/v1/jobs/{job}").status_code == 200
        client.close()
        with closing(sqlite3.connect(disk / "jobs.sqlite")) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def _free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def test_a_server_does_not_start_on_a_read_only_disk_until_it_is_not(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 500):
        with asked(disk / "jobs.sqlite") as client:
            job = submit(client, 0, "a").json()["id"]
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        told = refused("serve", "--port", 0, "--store", disk / "jobs.sqlite")
        assert "no store of jobs can be kept here" in told
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        with asked(disk / "jobs.sqlite") as client:
            assert client.get(f"/v1/jobs/{job}").json()["state"] == "queued"
            assert submit(client, 0, "a").json()["id"] == job


def test_a_database_that_another_process_locks_is_read_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "LOCK_SECONDS", 0.2)
    with asked(path) as client, closing(sqlite3.connect(path)) as other:
        job = submit(client, 0, "a").json()["id"]
        other.execute("BEGIN IMMEDIATE")
        require_unavailable(submit(client, 1, "b"))
        require_unavailable(client.delete(f"/v1/jobs/{job}"))
        assert client.get(f"/v1/jobs/{job}").json()["state"] == "queued"
        other.rollback()
        assert submit(client, 1, "b").is_success
        assert client.delete(f"/v1/jobs/{job}").json()["stopped_by"] == "user"


def test_nothing_is_accepted_into_a_deleted_file(path: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with asked(path) as client:
        job = submit(client, 0, "a").json()["id"]
        path.rename(kept)
        require_unavailable(submit(client, 1, "b"))
        require_unavailable(client.get(f"/v1/jobs/{job}"))
        require_unavailable(client.get("/health/ready"))
        assert not path.exists()
        kept.rename(path)
        assert client.get(f"/v1/jobs/{job}").json()["state"] == "queued"
        assert submit(client, 1, "b").is_success


def test_a_store_that_takes_the_place_of_another_is_taken_up(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with asked(other) as client:
        restored = submit(client, 7, "restored").json()["id"]
    with asked(path) as client:
        before = submit(client, 0, "a").json()["id"]
        path.unlink()
        for end in ("-wal", "-shm"):
            path.with_name(path.name + end).unlink(missing_ok=True)
        shutil.move(other, path)
        assert client.get(f"/v1/jobs/{restored}").json()["state"] == "queued"
        assert client.get(f"/v1/jobs/{before}").status_code == 404
        assert submit(client, 1, "b").is_success


# --- PostgreSQL --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgreSQL]:
    with postgres_server() as found:
        yield found


def query(server: PostgreSQL, text: str) -> None:
    command = ["psql", "-h", "localhost", "-p", str(server.port), "-U", server.user, "postgres"]
    subprocess.run([*command, "-c", text], check=True, capture_output=True)


@pytest.mark.slow
def test_a_server_says_why_it_cannot_use_postgresql(postgresql: PostgreSQL) -> None:
    query(postgresql, "CREATE ROLE ann LOGIN PASSWORD 'right'")
    rules = postgresql.folder / "data" / "pg_hba.conf"
    rules.write_text(f"host all ann all scram-sha-256\n{rules.read_text()}")
    query(postgresql, "SELECT pg_reload_conf()")
    at = f"localhost:{postgresql.port}"
    for url, said in (
        (f"{postgresql.user}@{at}/missing", 'database "missing" does not exist'),
        (f"ann:secret@{at}/postgres", 'password authentication failed for user "ann"'),
        (f"ann:right@{at}/postgres", "permission denied for schema public"),
        ("ann@127.0.0.1:1/postgres", "Connection refused"),
    ):
        told = refused("serve", "--port", 0, "--store", f"postgresql+psycopg://{url}")
        assert said in told
        assert "secret" not in told


@pytest.mark.slow
def test_jobs_outlive_restarts_of_postgresql(postgresql: PostgreSQL, tmp_path: Path) -> None:
    with serving(postgresql.new_database(), tmp_path) as served, Client(served.url) as client:
        text = long_request(time_limit=600.0)
        job = client.submit("plan", text).id
        while not client.job(job).has_document:
            time.sleep(0.1)
        query(postgresql, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
              "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()")  # fmt: skip
        postgresql.restart()
        answer = _patiently(lambda: client.job(job))
        assert answer.has_document
        assert answer.state in ("solving", "queued")
        other = _patiently(lambda: client.submit("jobshop", TWO_JOBS, key="once"))
        assert client.wait(other.id, PATIENCE).state == "optimal"
        client.stop(job)
        found = client.wait(job, PATIENCE)
        assert (found.state, found.stopped_by) == ("feasible", "user")
        require_told(client, found, text)
        assert "Traceback" not in served.errors


def _patiently(call: Callable[[], T]) -> T:
    """What a call returns when the store answers again."""
    ends = time.monotonic() + PATIENCE
    while True:
        try:
            return call()
        except ServiceError as error:
            if error.status != 503 or time.monotonic() > ends:
                raise
            time.sleep(0.2)


@pytest.mark.slow
def test_a_full_disk_keeps_the_best_plan_of_a_running_job(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 1000):
        with serving(str(disk / "jobs.sqlite"), tmp_path) as served, Client(served.url) as client:
            text = long_request(time_limit=600.0)
            job = client.submit("plan", text).id
            while not client.job(job).has_document:
                time.sleep(0.1)
            (disk / "other").write_bytes(b"\0" * _free(disk))
            time.sleep(10.0)  # more than two leases
            assert client.job(job).has_document
            (disk / "other").unlink()
            _patiently(lambda: client.stop(job))
            found = client.wait(job, PATIENCE)
            assert found.state == "feasible"
            require_told(client, found, text)
        require_free(disk / "jobs.sqlite")
