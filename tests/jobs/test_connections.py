"""Connections of a server: half-sent requests, and more of them than it has files for."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from planning_jobs import plan_request
from processes import PATIENCE
from served import listening

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

import httpx
from sqlalchemy import text

from stagewright.service.http import server as http_server
from stagewright.service.http.app import create_app
from stagewright.service.http.guard import Service
from stagewright.service.http.limits import RequestLimits
from stagewright.service.http.server import Connection
from stagewright.service.jobs.records import JobEnding
from stagewright.service.jobs.store import ServiceStore

SECONDS = 0.3  # for headers to arrive


@contextmanager
def serving(store: ServiceStore, most: int, streams: int | None = None) -> Iterator[int]:
    """The port of a server in a thread."""
    app = create_app(Service(store, RequestLimits(streams=streams), open_to_all=True))
    protocol = type("Few", (Connection,), {"most": most})
    with listening(app, http=protocol, timeout_keep_alive=1) as port:
        yield port


def ended(connection: socket.socket) -> bytes:
    """What is received until the other end closes."""
    connection.settimeout(PATIENCE)
    found = b""
    try:
        while part := connection.recv(4096):
            found += part
    except ConnectionResetError:
        pass
    return found


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_SECONDS", SECONDS)


@pytest.mark.parametrize("before", [b"", b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"])
@pytest.mark.parametrize("half", [b"", b"GET / HTTP/1.1\r\nX: "])
def test_a_request_that_does_not_arrive_is_closed(
    store: ServiceStore, before: bytes, half: bytes
) -> None:
    """Neither as the first of its connection nor after another, and not by single bytes."""
    with serving(store, 10) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(before + half)
        found = ended(connection)
    assert found.startswith(b"HTTP/1.1 200") == bool(before)


def test_single_bytes_do_not_keep_a_connection(store: ServiceStore) -> None:
    with serving(store, 10) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        ends, closed = time.monotonic() + PATIENCE, False
        while not closed and time.monotonic() < ends:
            time.sleep(0.05)
            try:
                connection.sendall(b"G")
            except OSError:
                closed = True
    assert closed


def test_connections_beyond_the_most_are_closed_and_others_answered(store: ServiceStore) -> None:
    with serving(store, 4) as port, ExitStack() as held:
        address = ("127.0.0.1", port)
        waiting = [held.enter_context(socket.create_connection(address)) for _ in range(8)]
        for one in waiting:
            ended(one)  # at once, or because nothing arrives
        live = httpx.get(f"http://127.0.0.1:{port}/health/live", timeout=PATIENCE)
        assert live.status_code == 200


def test_a_long_answer_outlives_the_wait_for_headers(store: ServiceStore) -> None:
    job, _ = store.submit("local", "plan", "{}")
    with serving(store, 10, streams=1) as port:
        url = f"http://127.0.0.1:{port}/v1/jobs/{job.id}/events"
        with httpx.stream("GET", url, timeout=PATIENCE) as stream:
            lines = stream.iter_lines()
            assert "queued" in next(line for line in lines if line.startswith("event"))
            refused = httpx.get(url, timeout=PATIENCE)
            assert (refused.status_code, "1 streams" in refused.text) == (429, True)
            time.sleep(2 * SECONDS)
            store.ask(job.id, JobEnding.ABORT)
            assert [line for line in lines if line.startswith("event")][-1] == "event: failed"
        again = httpx.get(url, timeout=PATIENCE)  # counted no more
        assert again.status_code == 200


def test_head_is_get_without_its_body_and_long_answers_are_compressed(store: ServiceStore) -> None:
    with serving(store, 10) as port:
        url = f"http://127.0.0.1:{port}/v1/openapi.json"
        plain = {"Accept-Encoding": "identity"}
        got, head = (ask(url, headers=plain, timeout=PATIENCE) for ask in (httpx.get, httpx.head))
        small = httpx.get(url, timeout=PATIENCE)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"]
    assert small.json() == got.json()
    assert int(small.headers["content-length"]) < len(got.content) / 4


def test_long_texts_are_compressed_in_the_store(store: ServiceStore) -> None:
    request = json.dumps(json.loads(plan_request()) | {"padding": ["ä"] * 10_000})
    job, _ = store.submit("ann", "plan", request)
    found = store.get(job.id)
    assert found is not None
    assert found.request == request
    assert store.submit("bob", "plan", request)[1]
    with store.engine.connect() as database:
        kept = database.execute(text("SELECT request FROM jobs")).scalars().all()
    assert all(len(one) < len(request) / 10 for one in kept)
