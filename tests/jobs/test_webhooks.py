"""Webhooks: every end of a job is told, signed, to addresses that the server was started for."""

import base64
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from commands import answered
from planning_jobs import TWO_JOBS, Clock
from processes import PATIENCE
from served import served
from sqlalchemy import text

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

import httpx
from fastapi.testclient import TestClient

from stagewright.graphs.documents.errors import InputError
from stagewright.service.http import webhooks
from stagewright.service.http.app import create_app
from stagewright.service.http.guard import Service
from stagewright.service.http.webhooks import PAUSES, Deliverer, Deliveries, Webhooks
from stagewright.service.jobs.queue import Queue
from stagewright.service.jobs.records import DeliveryRecord, DeliveryState, JobEnd, JobEnding, State
from stagewright.service.jobs.store import ServiceStore

SECRET = "a secret of the service of this test"
WAITING, DELIVERED, GIVEN_UP = DeliveryState
Received = list[tuple[dict[str, str], bytes]]


@contextmanager
def receiving(status: int = 204, **headers: str) -> Iterator[tuple[str, Received]]:
    """A receiver that answers with a status; its address, and what it has got."""
    received: Received = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(({name.lower(): one for name, one in self.headers.items()}, body))
            self.send_response(status)
            for name, one in headers.items():
                self.send_header(name, one)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[ServiceStore]:
    found = ServiceStore(url, clock)
    yield found
    found.close()


def ended(store: ServiceStore, url: str | None) -> str:
    """A job that has ended."""
    job, _ = store.submit("ann", "jobshop", TWO_JOBS, webhook=url)
    if not job.has_ended:
        store.ask(job.id, JobEnding.STOP)
    return job.id


def deliver_all(store: ServiceStore, origin: str) -> list[bool]:
    """What becomes of all that is due."""
    deliverer, found = Deliverer(store, Webhooks((origin,), SECRET)), []
    while (due := Deliveries(store).claim()) is not None:
        found.append(deliverer.deliver(due))
    return found


def told_of(store: ServiceStore) -> DeliveryRecord | None:
    """What the newest job says of its webhook."""
    (job,) = store.page(None, limit=1)
    assert store.get(job.id) == job
    return job.delivery


def test_every_end_of_a_job_is_told_once(store: ServiceStore, clock: Clock) -> None:
    queue = Queue(store)
    with receiving() as (origin, received):
        url = f"{origin}/hook?a=b"
        stopped = ended(store, url)
        ended(store, None)
        solved, _ = store.submit("ann", "jobshop", TWO_JOBS, webhook=url)
        assert deliver_all(store, origin) == [True]
        queue.claim("w", 10.0)
        queue.finish(solved.id, "w", JobEnd(State.OPTIMAL, answer="{}", cost=6.0, bound=6.0))
        clock.now += 1.0
        known, _ = store.submit("bob", "jobshop", TWO_JOBS, webhook=url)
        assert told_of(store) == DeliveryRecord(WAITING)
        assert deliver_all(store, origin) == [True, True]
        assert told_of(store) == DeliveryRecord(DELIVERED, 1)
        assert deliver_all(store, origin) == []
        told = [json.loads(body)["data"] for _, body in received]
    assert {one["id"]: one["state"] for one in told} == {
        stopped: "failed", solved.id: "optimal", known.id: "optimal",
    }  # fmt: skip
    assert len({headers["webhook-id"] for headers, _ in received}) == 3


def test_a_delivery_is_signed_with_the_users_secret(store: ServiceStore, clock: Clock) -> None:
    with receiving() as (origin, received):
        ended(store, origin)
        deliver_all(store, origin)
    (headers, body), hooks = received[0], Webhooks((origin,), SECRET)
    key = base64.b64decode(hooks.secret_of("ann").removeprefix("whsec_"))
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert headers["webhook-timestamp"] == str(int(clock.now))
    assert hooks.secret_of("ann") != hooks.secret_of("bob")
    assert SECRET not in repr(hooks)


@pytest.mark.parametrize("status", [302, 404, 500])
def test_a_delivery_is_tried_again_after_growing_pauses(
    store: ServiceStore, clock: Clock, status: int
) -> None:
    with receiving() as (elsewhere, wrong), receiving(status, Location=elsewhere) as (origin, got):
        ended(store, origin)
        assert deliver_all(store, origin) == [False]
        for pause in PAUSES:
            assert told_of(store) == DeliveryRecord(WAITING, len(got), f"HTTP {status}")
            clock.now += pause - 1.0
            assert deliver_all(store, origin) == []
            clock.now += 1.0
            assert deliver_all(store, origin) == [False]
        assert told_of(store) == DeliveryRecord(GIVEN_UP, len(got), f"HTTP {status}")
        clock.now += 1e6
        assert deliver_all(store, origin) == []
    assert len(got) == 1 + len(PAUSES)
    assert len({headers["webhook-id"] for headers, _ in got}) == 1
    assert not wrong  # no redirect is followed


def test_a_server_that_is_killed_while_it_delivers_loses_nothing(
    store: ServiceStore, clock: Clock
) -> None:
    with receiving() as (origin, received):
        ended(store, origin)
        assert Deliveries(store).claim() is not None  # by a server that is not heard of again
        assert deliver_all(store, origin) == []
        clock.now += PAUSES[0]
        assert deliver_all(store, origin) == [True]
    assert len(received) == 1


def test_an_end_that_is_not_stored_is_not_told(store: ServiceStore) -> None:
    job, _ = store.submit("ann", "jobshop", TWO_JOBS, webhook="http://127.0.0.1:1")
    with store.engine.begin() as database:
        database.execute(text("DROP TABLE deliveries"))
    with pytest.raises(Exception, match="deliveries"):
        store.ask(job.id, JobEnding.STOP)
    with store.engine.connect() as database:
        states = database.execute(text("SELECT state FROM jobs")).scalars().all()
    assert states == [State.QUEUED]


def test_a_job_that_is_discarded_is_not_told_of(store: ServiceStore) -> None:
    with receiving() as (origin, received):
        store.discard(ended(store, origin))
        assert deliver_all(store, origin) == []
    assert received == []


def test_a_receiver_that_does_not_answer_is_left(
    store: ServiceStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        origin = f"http://127.0.0.1:{silent.getsockname()[1]}"
        ended(store, origin)
        assert deliver_all(store, origin) == [False]
        assert told_of(store) == DeliveryRecord(WAITING, 1, "no answer of HTTP within 0.2 s")
    clock.now += PAUSES[0]
    assert deliver_all(store, origin) == [False]
    assert told_of(store) == DeliveryRecord(WAITING, 2, "no connection: Connection refused")


def test_a_job_that_is_queued_again_is_told_of_when_it_ends_again(
    store: ServiceStore, clock: Clock
) -> None:
    with receiving() as (origin, received):
        job = ended(store, origin)
        store.retry(job)
        assert deliver_all(store, origin) == []
        clock.now += 5.5
        store.ask(job, JobEnding.STOP)
        claimed = Deliveries(store).claim()
        store.retry(job)  # while a server is about to tell
        assert claimed is not None
        assert not Deliverer(store, Webhooks((origin,), SECRET)).deliver(claimed)
        store.ask(job, JobEnding.STOP)
        clock.now += 7.0
        assert deliver_all(store, origin) == [True]
    told = json.loads(received[0][1])
    assert told["data"]["state"] == "failed"
    assert told["timestamp"] == int(told["data"]["finished"])


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "169.254.169.254",
        "0.0.0.0",
        "::1",
        "::ffff:127.0.0.1",
        "fe80::1%eth0",
        "224.0.0.1",
    ],
)
def test_names_have_no_addresses_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    connected = []
    found = [(0, 0, 0, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "create_connection", lambda *told: connected.append(told))
    with pytest.raises(OSError, match=r"hooks\.example is"):
        webhooks.post("http://hooks.example/x", b"", {})
    assert not connected


def test_what_was_checked_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that changes its address in between has no effect."""
    with receiving() as (origin, received):
        port = int(origin.rpartition(":")[2])
        answers = [[(0, 0, 0, "", ("10.1.2.3", port))], [(0, 0, 0, "", ("127.0.0.1", port))]]
        connect, asked = socket.create_connection, []

        def resolve(*_: Any, **__: Any) -> Any:
            return answers.pop(0)

        def record(address: Any, *rest: Any) -> Any:
            asked.append(address)
            monkeypatch.undo()
            return connect(("127.0.0.1", port), *rest)

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        monkeypatch.setattr(socket, "create_connection", record)
        assert webhooks.post(f"http://hooks.example:{port}/x", b"{}", {}) == 204
    assert asked == [("10.1.2.3", port)]
    assert received[0][0]["host"] == f"hooks.example:{port}"


def test_a_server_tells_of_the_ends_of_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(webhooks.SECRET, SECRET)
    with (
        receiving() as (origin, received),
        served(tmp_path, "--webhook-origin", origin) as (url, _),
    ):
        made = httpx.post(
            f"{url}/v1/jobshop", content=TWO_JOBS, params={"webhook": origin}, timeout=PATIENCE
        )
        ends = time.monotonic() + PATIENCE
        path = f"{url}/v1/jobs/{made.json()['id']}"
        while (
            httpx.get(path, timeout=PATIENCE).json()["webhook"]["state"] != "delivered"
            and time.monotonic() < ends
        ):
            time.sleep(0.05)
        assert "webhook delivered\n" in answered("jobs", made.json()["id"], "--server", url)
    told = json.loads(received[0][1])
    assert (told["type"], told["data"]["id"]) == ("job.ended", made.json()["id"])
    assert told["data"]["state"] == "optimal"


ALLOWED = Webhooks(("https://hooks.example", "http://127.0.0.1:99"), SECRET)


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.evil.example/", "https://evil.example/", "http://hooks.example/",
        "https://hooks.example:444/", "https://hooks.example@evil.example/",
        "https://a:b@hooks.example/", "https://hooks.example#@evil.example",
        "https://hooks.example\\@evil.example/", "https://evil.example/https://hooks.example",
        "file:///etc/passwd", "https:///x", "hooks.example", "", "https://hooks.example:0/",
        "https://hooks.example:x/", "https://hooks.example/a b", "https://hooks.example/\r\nX: y",
        "https://hooks.ex\u0430mple/", "http://127.0.0.1:98/", "http://[::1]:99/", "https://[/",
    ],
)  # fmt: skip
def test_webhooks_go_nowhere_else(url: str) -> None:
    with pytest.raises(InputError, match="webhook: "):
        ALLOWED.require_allowed(url)


def test_origins_and_secrets_are_checked_at_the_start() -> None:
    ALLOWED.require_allowed("https://hooks.example/a?b=c")
    ALLOWED.require_allowed("https://HOOKS.example:443")
    with pytest.raises(InputError, match="write it as"):
        Webhooks(("https://hooks.example/path",), SECRET)
    with pytest.raises(InputError, match="at least 24"):
        Webhooks(("https://hooks.example",), "short")


def test_webhooks_are_asked_for_over_http(store: ServiceStore) -> None:
    app = create_app(Service(store, open_to_all=True, webhooks=ALLOWED))
    with TestClient(app, "http://127.0.0.1") as client:
        where = {"webhook": "https://hooks.example/a"}
        made = client.post("/v1/jobshop", content=TWO_JOBS, params=where)
        assert store.get(made.json()["id"]).webhook == where["webhook"]  # type: ignore[union-attr]
        assert made.json()["webhook"] == {"state": "waiting", "attempts": 0, "reason": ""}
        elsewhere = client.post("/v1/jobshop", content=TWO_JOBS, params={"webhook": "http://x"})
        assert elsewhere.status_code == 422
        assert "must be at one of https://hooks.example" in elsewhere.json()["detail"]
        told = client.get("/v1/webhooks").json()
        assert told["secret"] == ALLOWED.secret_of("local")
    with TestClient(create_app(Service(store, open_to_all=True)), "http://127.0.0.1") as client:
        off = client.post("/v1/jobshop", content=TWO_JOBS, params=where)
        assert "sends none" in off.json()["detail"]
        assert client.get("/v1/webhooks").status_code == 422
