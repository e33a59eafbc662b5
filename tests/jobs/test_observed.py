"""What those who run a service see of it: metrics, lines of its log, and the overview."""

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_jobs import TWO_JOBS, Clock, EndedProcess
from profiles import examples

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from fastapi.testclient import TestClient
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from stagewright.service import tracing
from stagewright.service.http import jobs
from stagewright.service.http.app import create_app
from stagewright.service.http.guard import Service
from stagewright.service.http.tokens import Scope, Tokens
from stagewright.service.jobs.overview import (
    ALIVE_SECONDS,
    LISTED,
    Overview,
    Presence,
    overview,
    waiting_by_kind,
)
from stagewright.service.jobs.queue import Queue
from stagewright.service.jobs.records import JobEnd, JobEnding, State
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.tracing import Lines
from stagewright.service.workers.worker import Worker

LOCAL = "http://127.0.0.1:8754"
UNITS = ("seconds", "bytes", "total", "info", "ratio")


@pytest.fixture
def client(store: ServiceStore) -> Iterator[TestClient]:
    """A client of a service that is open to this machine alone."""
    app = create_app(Service(store, open_to_all=True))
    with TestClient(app, LOCAL, raise_server_exceptions=False) as found:
        yield found


def families(client: TestClient) -> dict[str, Metric]:
    return {one.name: one for one in text_string_to_metric_families(client.get("/metrics").text)}


def sample(client: TestClient, name: str, **labels: str) -> float:
    """The value of a sample; 0 without one."""
    found = (one for family in families(client).values() for one in family.samples)
    return next((one.value for one in found if (one.name, one.labels) == (name, labels)), 0.0)


def test_names_of_metrics_keep_the_conventions_of_prometheus(client: TestClient) -> None:
    client.post("/v1/jobshop", content=TWO_JOBS)
    found = families(client)
    assert len(found) >= 20
    for name, one in found.items():
        assert re.fullmatch(r"(stagewright|process)_[a-z_]*[a-z]", name), name
        assert one.documentation, name
        assert not name.endswith(("_total", "_count", "_sum", "_bucket")), name  # of samples alone
        if one.type == "histogram":
            assert name.endswith(("_seconds", "_bytes")), name
        for each in one.samples:
            assert one.type != "counter" or each.name == f"{name}_total", each
            assert all(re.fullmatch("[a-z][a-z_]*", label) for label in each.labels), each
            assert not re.search("milli|micro|minute|hour|kilo|mega", each.name), each


def test_metrics_tell_of_the_queue_by_kind(client: TestClient, store: ServiceStore) -> None:
    age, waiting = "stagewright_queue_age_seconds", "stagewright_queue_jobs"
    assert sample(client, age, kind="jobshop") == sample(client, waiting, kind="jobshop") == 0
    client.post("/v1/jobshop", content=TWO_JOBS)
    assert sample(client, "stagewright_jobs", state="queued") == 1
    created = store.page("local")[0].created
    store.clock = lambda: created + 7
    assert sample(client, waiting, kind="jobshop") == 1
    assert sample(client, age, kind="jobshop") == pytest.approx(7, abs=0.1)
    assert sample(client, age, kind="plan") == 0
    Queue(store).claim("w", 60.0)
    assert sample(client, "stagewright_running_jobs", kind="jobshop") == 1
    assert sample(client, age, kind="jobshop") == 0


def test_the_age_of_a_job_that_is_tried_again_is_that_of_its_last_turn(
    client: TestClient, store: ServiceStore
) -> None:
    clock = store.clock = Clock()
    job, _ = store.submit("ann", "jobshop", TWO_JOBS)
    store.ask(job.id, JobEnding.STOP)
    clock.now += 86400
    store.retry(job.id)
    clock.now += 3
    assert sample(client, "stagewright_queue_age_seconds", kind="jobshop") == 3
    assert overview(store).queue[0].seconds == 3


def test_requests_are_counted_by_route(client: TestClient) -> None:
    count = "stagewright_request_seconds_count"
    posted = {"code": "202", "method": "POST", "route": "/v1/jobshop"}
    missing = {"code": "404", "method": "any", "route": "none"}
    before = sample(client, count, **posted), sample(client, count, **missing)
    client.post("/v1/jobshop", content=TWO_JOBS)
    client.request("INVENTED", f"/{'no route ' * 3}")
    after = sample(client, count, **posted), sample(client, count, **missing)
    assert after == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize("scope", [None, Scope.SUBMIT, Scope.ADMIN])
def test_waits_and_runs_tell_the_class_of_the_user(
    client: TestClient, store: ServiceStore, scope: Scope | None
) -> None:
    headers = {}
    if scope is not None:
        headers["Authorization"] = f"Bearer {Tokens(store.engine).create('ann', scope)}"
    client.headers.update(headers)
    labels = {"kind": "jobshop", "user_class": "local" if scope is None else scope.value}
    names = [f"stagewright_job_{what}_seconds_count" for what in ("wait", "run")]
    names_of_ends = ("stagewright_jobs_ended_total", {"kind": "jobshop", "state": "optimal"})
    before = [sample(client, name, **labels) for name in names]
    ended = sample(client, names_of_ends[0], **names_of_ends[1])
    client.post("/v1/jobshop", content=TWO_JOBS)
    worker = Worker(store, start=lambda *_: EndedProcess(State.OPTIMAL))
    worker.presence.tell()
    assert sample(client, "stagewright_workers", state="idle") == 1
    job = worker.queue.claim(worker.name, 60.0)
    assert job is not None
    assert sample(client, "stagewright_workers", state="busy") == 1
    worker.answer(job)
    assert [sample(client, name, **labels) for name in names] == [one + 1 for one in before]
    assert sample(client, names_of_ends[0], **names_of_ends[1]) == ended + 1
    worker.presence.leave()
    assert sample(client, "stagewright_workers", state="idle") == 0


def test_a_store_that_takes_no_jobs_is_not_ready(client: TestClient, store: ServiceStore) -> None:
    assert client.get("/health/ready").status_code == 200
    assert sample(client, "stagewright_store_writable") == 1
    assert sample(client, "stagewright_store_free_bytes") > 0

    @event.listens_for(store.engine, "checkout")
    def read_only(connection: Any, *_: Any) -> None:
        connection.execute("PRAGMA query_only=ON")

    response = client.get("/health/ready")
    assert response.status_code == 503
    assert "does not answer" in response.json()["detail"]
    assert client.get("/health/live").status_code == 200
    assert sample(client, "stagewright_store_writable") == 0


@pytest.mark.parametrize("as_json", [True, False])
def test_requests_and_events_of_jobs_are_logged_with_their_ids(
    client: TestClient, as_json: bool
) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(Lines(as_json))
    tracing.LOG.addHandler(handler)
    tracing.LOG.setLevel(logging.INFO)
    try:
        job = client.post("/v1/jobshop", content=TWO_JOBS).json()["id"]
        client.get('/no "route"')
        client.get("/%1b[2J")
    finally:
        tracing.LOG.removeHandler(handler)
    lines = written.getvalue().splitlines()
    if as_json:
        queued, audited, posted, missing, _ = map(json.loads, lines)
        assert (audited["what"], audited["event"], audited["made"]) == ("audit", "submit", job)
        assert (queued["what"], queued["job"], queued["event"]) == ("job", job, "queued")
        assert (posted["method"], posted["path"], posted["code"]) == ("POST", "/v1/jobshop", 202)
        assert missing["path"] == '/no "route"'
    else:
        assert lines[0].endswith(f" info job job={job} event=queued")
        assert "method=POST path=/v1/jobshop code=202" in lines[2]
        assert r'path="/no \"route\"" code=404' in lines[3]
        assert r'path="/\u001b[2J"' in lines[4]


# --- The overview ---------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "claim", "finish", "stop", "lose", "retry", "wait"]),
        st.sampled_from(["ann", "bob", "cid"]),
        st.integers(0, 20),
    ),
    max_size=25,
)


def take(store: ServiceStore, step: tuple[str, str, int], count: int) -> None:
    """Take a step of the life of jobs, as far as it can be taken."""
    what, user, number = step
    clock, queue = store.clock, Queue(store)
    jobs = store.page(None)
    running = [one for one in jobs if one.state is State.SOLVING]
    waiting = [one for one in jobs if one.state is State.QUEUED]
    ended = [one for one in jobs if one.state is State.FAILED]
    worker = f"w{number % 3}"
    if what == "submit":
        kind = ("plan", "jobshop")[number % 2]
        store.submit(user, kind, json.dumps({"n": count}), priority=number % 3 - 1)
    elif what == "claim" and not any(_worker(store, one.id) == worker for one in running):
        Presence(store, worker, 0.0).tell(1e6 * number)
        queue.claim(worker, 10.0)
    elif what == "finish" and running:
        queue.finish(running[0].id, _worker(store, running[0].id), JobEnd(State.OPTIMAL))
    elif what == "stop" and waiting:
        store.ask(waiting[-1].id, JobEnding.STOP)
    elif what == "lose":
        clock.now += 11  # type: ignore[attr-defined]
        queue.expire()
    elif what == "retry" and ended:
        store.retry(ended[0].id)
    clock.now += number  # type: ignore[attr-defined]


def _worker(store: ServiceStore, job: str) -> str:
    with store.engine.connect() as database:
        found = database.exec_driver_sql("SELECT worker FROM jobs WHERE id = ?", (job,))
        return str(found.scalar_one())


@examples(60, quick=15)
@given(steps=STEPS)
def test_the_overview_is_that_of_all_jobs_and_their_events(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("jobs")
    store = ServiceStore(f"sqlite:///{folder / 'jobs.sqlite'}", Clock())
    for count, step in enumerate(steps):
        take(store, step, count)
    now, jobs, found = store.clock(), store.page(None), overview(store)
    assert found.jobs == {state: sum(one.state is state for one in jobs) for state in State}
    queued = {one.id: one for one in jobs if one.state is State.QUEUED}
    assert (found.waiting, {one.id for one in found.queue}) == (len(queued), queued.keys())
    for one in found.queue:
        last = max(told.at for told in store.events(one.id) if told.name == State.QUEUED)
        assert one.seconds == now - last
    assert found.longest_seconds == max((one.seconds for one in found.queue), default=0)
    turns: dict[str, list[int]] = {}
    for one in found.queue:
        turns.setdefault(one.user, []).append(one.priority)
        assert len(turns[one.user]) == max(map(len, turns.values()))
    assert all(own == sorted(own, reverse=True) for own in turns.values())
    running = {one.id: _worker(store, one.id) for one in jobs if one.state is State.SOLVING}
    assert {one.job: one.name for one in found.workers if one.job} == running
    for each in found.workers:
        assert each.alive == (now - each.seen <= ALIVE_SECONDS)
    for user in found.users:
        own = [one for one in jobs if one.user == user.user]
        assert user.jobs == len(own)
        assert user.running == sum(one.state is State.SOLVING for one in own)
        assert user.queued == sum(one.state is State.QUEUED for one in own)
        ends = [now if one.state is State.SOLVING else one.finished for one in own]
        pairs = [(one.started, end) for one, end in zip(own, ends, strict=True)]
        assert user.seconds == sum(end - start for start, end in pairs if start and end)
    assert {one.user for one in found.users} == {one.user for one in jobs}
    store.close()


def test_the_overview_says_why_a_job_waits(url: str) -> None:
    clock = Clock()
    store = ServiceStore(url, clock)
    queue = Queue(store)

    def why() -> list[str]:
        return [one.why for one in overview(store).queue]

    first, _ = store.submit("ann", "plan", "{}")
    store.submit("ann", "plan", '{"n": 1}')
    assert why() == ["no worker is alive"] * 2
    Presence(store, "w", 4.0).tell()
    assert why() == ["is begun next", "the jobs before it"]
    queue.claim("w", 10.0)
    assert why() == ["the worker is busy with a job of theirs"]
    Presence(store, "v", 4.0).tell()
    queue.claim("v", 10.0)
    store.submit("bob", "plan", '{"n": 2}')
    assert why() == ["all 2 workers are busy"]
    clock.now += 11
    for _ in range(2):  # the first loss is not paused after
        queue.expire()
        queue.claim("v", 10.0)
        queue.claim("w", 10.0)
        clock.now += 11
    queue.expire()
    assert any("s more, after its worker was lost (2 times)" in one for one in why())
    assert first.id in {one.id for one in overview(store).queue}
    assert waiting_by_kind(store)["plan"][0] == len(why())
    assert [one.alive for one in overview(store).workers] == [False, False]
    clock.now += 3600
    assert overview(store).workers == ()
    store.close()


def test_overviews_are_streamed_as_jobs_come(
    client: TestClient, store: ServiceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    def counted(of: ServiceStore) -> Overview:
        nonlocal asked
        asked += 1
        if asked == 4:
            raise OperationalError("", None, Exception("gone"))
        found = overview(of)
        store.submit("ann", "plan", f'{{"n": {asked}}}')
        return found

    monkeypatch.setattr(jobs, "overview", counted)
    monkeypatch.setattr(jobs, "LEAST_SECONDS", 0.01)
    monkeypatch.setattr(jobs, "MOST_SECONDS", 30.0)
    text = client.get("/v1/admin/events").text
    told = [json.loads(one[5:]) for one in text.splitlines() if one.startswith("data:")]
    assert [one["waiting"] for one in told] == [0, 1, 2]


def test_a_stream_ends_quietly_when_the_store_does_not_answer(
    client: TestClient, store: ServiceStore
) -> None:
    job, _ = store.submit("local", "plan", "{}")
    streams = {"/v1/admin/events": "FROM workers", f"/v1/jobs/{job.id}/events": "FROM events"}

    @event.listens_for(store.engine, "before_cursor_execute")
    def fails(_: Any, __: Any, statement: str, *___: Any) -> None:
        if any(one in statement.replace("\n", "") for one in streams.values()):
            raise OperationalError(statement, None, Exception("gone"))

    for one in streams:
        response = client.get(one)
        assert (response.status_code, response.text) == (200, "")


def test_only_administrators_see_the_overview(client: TestClient, store: ServiceStore) -> None:
    assert client.get("/v1/me").json() == {"user": "local", "scope": "admin"}
    assert client.get("/admin", follow_redirects=False).headers["location"] == "./#/admin"
    tokens = {scope: Tokens(store.engine).create("ann", scope) for scope in Scope}
    for _ in range(LISTED + 1):
        store.submit("bob", "plan", json.dumps({"n": _}), title="x" * 200)
    for scope, token in tokens.items():
        headers = {"Authorization": f"Bearer {token}"}
        assert client.get("/v1/me", headers=headers).json() == {"user": "ann", "scope": scope}
        answers = [client.get("/v1/admin", headers=headers)]
        if scope is not Scope.ADMIN:
            answers.append(client.get("/v1/admin/events", headers=headers))
            assert [one.status_code for one in answers] == [403, 403]
    told = answers[0].json()
    assert (told["waiting"], len(told["queue"]), told["queue"][0]["why"]) == (
        LISTED + 1, LISTED, "no worker is alive",
    )  # fmt: skip
    ann = next(one for one in told["users"] if one["user"] == "ann")
    assert ann["tokens"] == {"read": 1, "submit": 1, "admin": 1}
    assert token not in json.dumps(told)
