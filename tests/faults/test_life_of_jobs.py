"""The service beside an oracle of its documentation: random walks of users and workers."""

import base64
import hashlib
import hmac
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from life_oracle import ENDED, LEASE, PAUSES, KnownDelivery, KnownJob, Oracle
from planning_jobs import TWO_JOBS, Clock, plan_request
from postgres import postgres_server
from profiles import UNSHRUNK, examples

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from fastapi.testclient import TestClient
from sqlalchemy import MetaData

from stagewright.service.http import webhooks
from stagewright.service.http.app import create_app
from stagewright.service.http.guard import Service
from stagewright.service.http.limits import RequestLimits
from stagewright.service.http.tokens import Scope, Tokens
from stagewright.service.http.webhooks import Deliverer, Deliveries, Webhooks
from stagewright.service.jobs.kinds import parse_request
from stagewright.service.jobs.queue import JobLeaseLostError, Queue, QueueRules
from stagewright.service.jobs.records import JobEnd, JobEnding, State, StoppedBy
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.pipelines.planning import plan as plan_now
from stagewright.service.workers.processes import outcome_of

QUEUED, RUNNING, PREEMPT, UPLOADS = 3, 2, 8.0, 2
SECRET = "a secret of the service of this test"
ORIGIN = "https://hooks.example"
PLAN = json.loads(plan_request())
DOCUMENTS = {
    "model": [PLAN["chain"] | {"name": name} for name in ("m1", "m2", "m3")],
    "cluster": [PLAN["cluster"]],
}
BODIES = [("jobshop", json.dumps(json.loads(TWO_JOBS) | {"seed": seed})) for seed in range(3)]
BODIES += [("plan", plan_request()), ("jobshop", json.dumps(json.loads(TWO_JOBS)))]
TOKENS = {
    "ann": ("ann", "submit"), "ann reads": ("ann", "read"), "bob": ("bob", "submit"),
    "root": ("root", "admin"), "none": (None, None),
}  # fmt: skip
PATHS = (
    "", "/plan", "/answer", "/request", "/history", "/events", "/trace", "/timeline", "/figures",
    "/timeline.png", "/timeline.html", "/export/torchrun?command=x&per_server=1",
    f"/comparison?trace={'0' * 64}",
)  # fmt: skip
tokens = st.sampled_from([*TOKENS, "ann", "ann", "bob", "bob"])
numbers = st.integers(0, 30)
costs = st.sampled_from([1.0, 2.0, 3.0, 5.0])  # the least is 1
bounds = st.sampled_from([0.0, 0.5, 1.0])
ENDS = {
    "time": ("feasible", StoppedBy.TIME),
    "lost": ("failed", StoppedBy.LOST),
    "abort": ("failed", StoppedBy.USER),
}


class Life(RuleBasedStateMachine):
    """Users and workers of one store."""

    store: ServiceStore
    clock: Clock
    client: TestClient
    post: Any

    def __init__(self) -> None:
        super().__init__()
        _empty(self.store)
        self.clock.now += 1e7
        made = Tokens(self.store.engine)
        self.headers = {
            name: {"Authorization": f"Bearer {made.create(user, Scope(scope))}"} if user else {}
            for name, (user, scope) in TOKENS.items()
        }
        self.queue = Queue(self.store, QueueRules(RUNNING, PREEMPT))
        self.oracle = Oracle(QUEUED, RUNNING, PREEMPT)
        self.store.weigh("bob", 2.0)
        self.oracle.shares["bob"].weight = 2.0
        self.uploads: dict[str, dict[str, dict[str, Any]]] = {"ann": {}, "bob": {}, "root": {}}
        self.workers = 0
        self.discarded: list[str] = []
        self.told: set[str] = set()

    # --- Helpers ---

    def ask(self, method: str, path: str, who: str, **rest: Any) -> Any:
        headers = self.headers[who] | rest.pop("headers", {})
        response = self.client.request(method, path, headers=headers, **rest)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert response.headers["content-type"] == "application/problem+json"
            assert "\n" not in response.json()["detail"]
            for job in self.oracle.jobs.values():
                if TOKENS[who][0] not in (job.user, "root"):
                    assert job.id not in response.text or job.id in str(response.url)
        return response

    def refused(self, who: str, scope: str) -> int | None:
        """The status that a token without the scope gets."""
        if who == "none":
            return 401
        ranks = ["read", "submit", "admin"]
        return 403 if ranks.index(TOKENS[who][1]) < ranks.index(scope) else None

    def pick(self, number: int) -> KnownJob | None:
        jobs = list(self.oracle.jobs.values())
        return jobs[-1 - number % len(jobs)] if jobs else None

    def sees(self, who: str, job: KnownJob) -> bool:
        return TOKENS[who][0] in (job.user, "root")

    def running(self, number: int) -> KnownJob | None:
        jobs = [one for one in self.oracle.jobs.values() if one.state == "solving"]
        return jobs[number % len(jobs)] if jobs else None

    @rule(seconds=st.sampled_from([0.0, 1.0, 7.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    # --- Users ---

    @rule(
        who=tokens, body=st.integers(0, len(BODIES) - 1),
        key=st.sampled_from([None, None, "a", "b"]),
        priority=st.sampled_from([0, 0, 0, -100, 1, 100, 101]), hook=st.booleans(),
    )  # fmt: skip
    def submit(self, who: str, body: int, key: str | None, priority: int, hook: bool) -> None:
        self.clock.now += 1.0
        kind, text = BODIES[body]
        user = TOKENS[who][0]
        params: dict[str, Any] = {"priority": priority} if priority else {}
        if hook:
            params["webhook"] = f"{ORIGIN}/{user}"
        headers = {"Idempotency-Key": key} if key else {}
        response = self.ask(
            "POST", f"/v1/{kind}", who, content=text, params=params, headers=headers
        )
        told, oracle = response.status_code, self.oracle
        same = BODIES[body]
        refusal = self.refused(who, "submit")
        if refusal is not None or priority > 100:
            assert told in (refusal, 422 if priority > 100 else None)
            return
        if key is not None and (user, key) in oracle.keys:
            known = oracle.jobs[oracle.keys[user, key]]
            if (known.kind, known.body) == same:
                assert (told, response.json()["id"]) == (200, known.id)
            else:
                assert told == 409
            return
        sources = oracle.complete(*same)
        if not sources and oracle.queue_is_full(user):
            assert told == 429
            assert response.headers["retry-after"]
            return
        assert told == (200 if sources else 202), response.text
        view = response.json()
        assert view["id"] not in oracle.jobs
        assert response.headers["location"] == f"/v1/jobs/{view['id']}"
        job = KnownJob(view["id"], user, *same, self.clock.now, priority, hook)
        source = None
        if sources:
            # Which of several is not documented.
            plan = self.ask("GET", f"/v1/jobs/{view['id']}/plan", who)
            told_of = (view["state"], plan.text if view["has_document"] else None)
            source = next(one for one in sources if (one.state, one.document) == told_of)
        oracle.add(job, source, key)
        self.require(view, job)

    @rule(who=st.sampled_from(["ann", "bob"]), body=st.integers(0, 2), hook=st.booleans())
    def submit_simply(self, who: str, body: int, hook: bool) -> None:
        self.submit(who, body, None, 0, hook)

    @precondition(lambda self: self.oracle.jobs)
    @rule(number=numbers, verb=st.sampled_from(["stop", "abort", "retry", "discard"]))
    def change_ones_own(self, number: int, verb: str) -> None:
        job = self.pick(number)
        assert job is not None
        self.change(job.user, number, verb)

    @rule(who=tokens, number=numbers, verb=st.sampled_from(["stop", "abort", "retry", "discard"]))
    def change(self, who: str, number: int, verb: str) -> None:
        if (job := self.pick(number)) is None:
            return
        method, path = ("DELETE", "") if verb == "stop" else ("POST", f"/{verb}")
        response = self.ask(method, f"/v1/jobs/{job.id}{path}", who)
        told = response.status_code
        if (refusal := self.refused(who, "submit")) is not None:
            assert told == refusal
        elif not self.sees(who, job):
            assert told == 404
        else:
            assert told == self.oracle.change(job, verb, self.clock.now)
        if told == 200:
            self.require(response.json(), job)
        elif told == 204:
            self.discarded.append(job.id)

    @precondition(lambda self: self.oracle.jobs)
    @rule(who=tokens, number=numbers, change=st.integers(0, 5), path=st.sampled_from(PATHS))
    def guess(self, who: str, number: int, change: int, path: str) -> None:
        """What is no id of a job of one's own is answered as what is none of anybody."""
        if (job := self.pick(number)) is None or who == "none":
            return
        own = job.id
        strange = [own[:31], own[:8], own.upper(), f"{own}0", "%25", f"{own}%00"][change]
        if strange == own:  # digits only
            return
        names = [strange, *self.discarded[-1:]] + ([] if self.sees(who, job) else [job.id])
        for name in names:
            found = self.ask("GET", f"/v1/jobs/{name}{path}", who)
            assert found.status_code == 404
            assert found.json()["detail"].startswith("there is no job ")
            for pair in ((name, name), ("0" * 32, name)):
                params = dict(zip(("first", "second"), pair, strict=True))
                assert self.ask("GET", "/v1/diff", who, params=params).status_code == 404

    @rule(
        who=tokens,
        limit=st.integers(1, 4),
        state=st.sampled_from([None, "queued", *ENDED]),
        everybody=st.booleans(),
    )
    def page(self, who: str, limit: int, state: str | None, everybody: bool) -> None:
        params: dict[str, Any] = {"limit": limit}
        if state:
            params["state"] = state
        if everybody:
            params["all_users"] = True
        if (refusal := self.refused(who, "admin" if everybody else "read")) is not None:
            assert self.ask("GET", "/v1/jobs", who, params=params).status_code == refusal
            return
        seen: list[dict[str, Any]] = []
        before: str | None = None
        while True:
            page = self.ask(
                "GET", "/v1/jobs", who, params=params | ({"before": before} if before else {})
            ).json()
            seen += page["jobs"]
            assert len(page["jobs"]) <= limit
            before = page["next"]
            if before is None:
                break
            assert len(page["jobs"]) == limit
        user = TOKENS[who][0]
        jobs = [
            one for one in reversed(self.oracle.jobs.values())
            if (everybody or one.user == user) and state in (None, one.state)
        ]  # fmt: skip
        assert [one["id"] for one in seen] == [one.id for one in jobs]
        for view, job in zip(seen, jobs, strict=True):
            self.require(view, job)

    @precondition(lambda self: self.oracle.jobs)
    @rule(who=tokens, number=numbers)
    def page_of_others(self, who: str, number: int) -> None:
        """A page before the job of another user is that before one that is not there."""
        if (job := self.pick(number)) is None or who == "none" or job.user == TOKENS[who][0]:
            return
        found = self.ask("GET", "/v1/jobs", who, params={"before": job.id})
        none = self.ask("GET", "/v1/jobs", who, params={"before": "0" * 32})
        assert (found.status_code, found.text.replace(job.id, "0" * 32)) == (
            none.status_code,
            none.text,
        )

    @precondition(lambda self: self.oracle.jobs)
    @rule(number=numbers)
    def read_events(self, number: int) -> None:
        job = self.pick(number)
        assert job is not None
        self.require_events(job)

    # --- Uploads ---

    @rule(
        who=tokens,
        kind=st.sampled_from(list(DOCUMENTS)),
        number=numbers,
        name=st.sampled_from([None, "x"]),
    )
    def upload(self, who: str, kind: str, number: int, name: str | None) -> None:
        self.clock.now += 1.0
        document = DOCUMENTS[kind][number % len(DOCUMENTS[kind])]
        params = {"name": name} if name else {}
        response = self.ask(
            "POST", f"/v1/uploads/{kind}", who, content=json.dumps(document), params=params
        )
        if (refusal := self.refused(who, "submit")) is not None:
            assert response.status_code == refusal
            return
        mine = self.uploads[TOKENS[who][0]]
        known = next((one for one in mine.values() if one["document"] == document), None)
        if known is not None:
            assert (response.status_code, response.json()) == (200, known["view"])
        elif len(mine) >= UPLOADS:
            assert response.status_code == 409
        else:
            view = response.json()
            assert response.status_code == 201
            assert view["name"] == (name or document["name"])
            assert (view["kind"], view["created"]) == (kind, self.clock.now)
            mine[view["id"]] = {"document": document, "view": view}

    @rule(
        who=tokens,
        owner=st.sampled_from(["ann", "bob", "root"]),
        number=numbers,
        delete=st.booleans(),
    )
    def use_upload(self, who: str, owner: str, number: int, delete: bool) -> None:
        theirs = list(self.uploads[owner])
        if not theirs:
            return
        upload = theirs[number % len(theirs)]
        where, user = f"/v1/uploads/{upload}", TOKENS[who][0]
        if who == "none":
            assert self.ask("GET", where, who).status_code == 401
            return
        mine = self.uploads[user].get(upload)
        found = self.ask("GET", where, who)
        assert found.status_code == (200 if mine else 404)
        if mine:
            assert found.json() == mine["document"]
        field = "chain" if self.uploads[owner][upload]["view"]["kind"] == "model" else "cluster"
        named = json.dumps(PLAN | {field: {"upload": upload}})
        if self.refused(who, "submit") is None:
            valid = self.ask("POST", "/v1/plan/validate", who, content=named)
            assert valid.status_code == (200 if mine else 422)
        if delete:
            told = self.ask("DELETE", where, who).status_code
            assert told == (self.refused(who, "submit") or (204 if mine else 404))
            if told == 204:
                del self.uploads[user][upload]
        if who != "none":
            listed = self.ask("GET", "/v1/uploads?limit=1", who).json()
            newest = [one["view"] for one in reversed(self.uploads[user].values())]
            assert listed["uploads"] == newest[:1]
            assert listed["next"] == (newest[0]["id"] if len(newest) > 1 else None)

    # --- Workers ---

    @precondition(lambda self: self.oracle.next(self.clock.now))
    @rule()
    def claim(self) -> None:
        self.expire()
        self.workers += 1
        worker = f"w{self.workers}"
        expected = self.oracle.next(self.clock.now)
        claimed = self.queue.claim(worker, LEASE)
        assert (claimed and claimed.id) == (expected and expected.id)
        if expected is not None:
            self.oracle.claim(expected, worker, self.clock.now)

    @precondition(lambda self: self.running(0))
    @rule(number=numbers)
    def renew(self, number: int) -> None:
        if (job := self.running(number)) is None:
            return
        assert job.worker is not None
        if self.clock.now > job.heard + LEASE:
            return
        asked = self.queue.renew(job.id, job.worker, LEASE)
        assert asked == (JobEnding(job.asked) if job.asked else None)
        self.oracle.renew(job, self.clock.now)

    @precondition(lambda self: self.oracle.jobs)
    @rule(number=numbers)
    def give_way(self, number: int) -> None:
        if (job := self.running(number)) is None:
            return
        assert job.worker is not None
        worker, expected = job.worker, self.oracle.gives_way(job, self.clock.now)
        begun = self.queue.give_way(job.id, worker, LEASE, 1.0)
        assert (begun and begun.id) == (expected and expected.id)
        if expected is not None:
            self.oracle.give_way(job, expected, worker, self.clock.now)
            self.require_alike(job)

    @precondition(lambda self: self.running(0))
    @rule(number=numbers, cost=costs, bound=bounds)
    def improve(self, number: int, cost: float, bound: float) -> None:
        """A worker finds a plan; each is better than the one that it found before."""
        if (job := self.running(number)) is None:
            return
        assert job.worker is not None
        document = json.dumps({"cost": cost, "of": job.worker})
        self.queue.improve(job.id, job.worker, cost, bound, document)
        self.oracle.improve(job, cost, bound, document)
        self.require_alike(job)

    @precondition(lambda self: self.running(0))
    @rule(
        number=numbers, cost=costs, bound=bounds,
        how=st.sampled_from(["optimal", "feasible", "infeasible", "failed", *ENDS]),
    )  # fmt: skip
    def finish(self, number: int, cost: float, bound: float, how: str) -> None:
        job = self.running(number)
        assert job is not None
        assert job.worker is not None
        if job.asked == "abort":
            how = "abort"
        if how == "infeasible" and job.document:
            return  # no worker says so
        state, by = ENDS.get(how, (how, None))
        if how == "optimal":
            cost = bound = 1.0
        good = state in ("optimal", "feasible")
        document = json.dumps({"cost": cost, "of": job.worker, "last": True})
        carried = {"type": "none", "objects": []}
        answer = json.dumps({"by": job.worker, "of": job.id, "carried": carried})
        outcome = JobEnd(
            State(state), stopped_by=by, answer=answer if state != "failed" else None,
            document=document if good else None, cost=cost if good else None,
            bound=bound if good else None,
        )  # fmt: skip
        self.queue.finish(job.id, job.worker, outcome)
        self.oracle.give_back_lease(job, self.clock.now)
        if good:
            self.oracle.answer(job, cost, bound, document, answer)
        elif state == "infeasible":
            job.answer = answer
        self.oracle.end(job, state, by, self.clock.now)
        self.require_alike(job)

    @precondition(lambda self: self.running(0))
    @rule(number=numbers)
    def give_back(self, number: int) -> None:
        job = self.running(number)
        assert job is not None
        assert job.worker is not None
        self.queue.give_back(job.id, job.worker, "its server was stopped", counted=False)
        self.oracle.give_back(job, self.clock.now)
        self.require_alike(job)

    @precondition(lambda self: self.running(0))
    @rule()
    def lose(self) -> None:
        self.clock.now += LEASE + 1.0
        self.expire()

    def expire(self) -> None:
        held = {one.id: one.worker for one in self.oracle.jobs.values()}
        lost = self.oracle.expire(self.clock.now)
        assert self.queue.expire() == len(lost)
        for job in lost:
            self.require_alike(job)
            worker = held[job.id]
            assert worker is not None
            with pytest.raises(JobLeaseLostError):
                self.queue.renew(job.id, worker, LEASE)
            with pytest.raises(JobLeaseLostError):
                self.queue.improve(job.id, worker, 0.5, 0.5, "stale")
            with pytest.raises(JobLeaseLostError):
                self.queue.finish(job.id, worker, JobEnd(State.OPTIMAL, answer="{}"))

    # --- Webhooks ---

    @precondition(lambda self: self.oracle.deliveries)
    @rule(status=st.sampled_from([200, 204, 302, 500]))
    def deliver(self, status: int) -> None:
        due = [one for one in self.oracle.deliveries if one.due <= self.clock.now]
        sent: list[tuple[str, bytes, dict[str, str]]] = []
        self.post(lambda url, body, headers: sent.append((url, body, headers)) or status)
        deliverer = Deliverer(self.store, Webhooks((ORIGIN,), SECRET))
        while (found := Deliveries(self.store).claim()) is not None:
            assert deliverer.deliver(found) == (status < 300)
        assert len(sent) == len(due)
        for url, body, headers in sent:
            told = json.loads(body)
            known = next(
                one for one in due
                if one.job == told["data"]["id"] and one.id in (None, headers["webhook-id"])
            )  # fmt: skip
            due.remove(known)
            self.require_delivery(known, url, body, headers)
            if known.failures == 0:
                assert headers["webhook-id"] not in self.told
                self.told.add(headers["webhook-id"])
            if status < 300 or known.failures == len(PAUSES):
                self.oracle.deliveries.remove(known)
            else:
                known.due = self.clock.now + PAUSES[known.failures]
                known.failures, known.id = known.failures + 1, headers["webhook-id"]

    def require_delivery(
        self, known: KnownDelivery, url: str, body: bytes, headers: dict[str, str]
    ) -> None:
        told = json.loads(body)
        assert set(told) == {"type", "timestamp", "data"}
        assert told["type"] == "job.ended"
        assert url == f"{ORIGIN}/{known.user}"
        found = {name.lower(): one for name, one in headers.items()}
        secret = self.ask("GET", "/v1/webhooks", known.user).json()["secret"]
        require_signature(secret, found, body)
        assert found["webhook-timestamp"] == str(int(self.clock.now))
        job = self.oracle.jobs[known.job]
        self.require(told["data"], job)
        assert told["timestamp"] == int(job.finished or 0.0)

    @rule(pause=st.sampled_from(PAUSES))
    def wait_for_a_delivery(self, pause: float) -> None:
        self.wait(pause)
        self.expire()

    # --- What must hold ---

    def require(self, view: dict[str, Any], job: KnownJob) -> None:
        expected = {
            "id": job.id, "user": job.user, "kind": job.kind, "state": job.state,
            "priority": job.priority, "created": job.created, "stopped_by": job.stopped_by,
            "cost": job.cost, "bound": job.bound, "has_document": job.document is not None,
            "finished": job.finished,
        }  # fmt: skip
        assert {name: view[name] for name in expected} == expected
        assert job.cached or view["cached_from"] is None  # nor of a job of another user
        if not job.cached:
            assert view["started"] == job.started
        else:
            assert view["started"] == job.created
        if job.cost is not None and job.bound is not None:
            assert job.bound <= job.cost
            assert view["gap"] == pytest.approx((job.cost - job.bound) / job.cost)

    def require_alike(self, job: KnownJob) -> None:
        who = job.user
        self.require(self.ask("GET", f"/v1/jobs/{job.id}", who).json(), job)
        plan = self.ask("GET", f"/v1/jobs/{job.id}/plan", who)
        assert plan.status_code == (404 if job.document is None else 200)
        if job.document is not None:
            assert plan.text == job.document
        answer = self.ask("GET", f"/v1/jobs/{job.id}/answer?whole=true", who)
        if job.has_ended and job.answer is not None:
            assert answer.json() == json.loads(job.answer)
        else:
            assert answer.status_code == (404 if job.has_ended else 409)

    def require_events(self, job: KnownJob) -> None:
        where = f"/v1/jobs/{job.id}"
        history = self.ask("GET", f"{where}/history", job.user).json()
        assert [one["name"] for one in history if one["name"] != "progress"] == job.names
        found = [one["number"] for one in history]
        assert found == sorted(set(found))
        times = [one["at"] for one in history]
        assert times == sorted(times)
        for place, number in enumerate([0, *found]):
            rest = self.ask("GET", f"{where}/history", job.user, params={"after": number}).json()
            assert rest == history[place:]
            if job.has_ended:
                last = {"Last-Event-ID": str(number)} if number else {}
                text = self.ask("GET", f"{where}/events", job.user, headers=last).text
                assert _events(text) == rest

    @invariant()
    def everybody_sees_their_jobs(self) -> None:
        for user in ("ann", "bob"):
            page = self.ask("GET", "/v1/jobs?limit=100", user).json()
            jobs = self.oracle.mine(user)
            assert [one["id"] for one in page["jobs"]] == [one.id for one in jobs]
            for view, job in zip(page["jobs"], jobs, strict=True):
                self.require(view, job)

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            for job in self.oracle.jobs.values():
                self.require_alike(job)
                self.require_events(job)


def require_signature(secret: str, headers: dict[str, str], body: bytes) -> None:
    """As the specification of Standard Webhooks verifies it."""
    key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    assert 24 <= len(key) <= 64
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert expected in headers["webhook-signature"].split(" ")
    assert "." not in headers["webhook-id"]


def _events(text: str) -> list[dict[str, Any]]:
    """What a stream says, as the history does."""
    found = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "id" in lines:
            data = json.loads(lines["data"])
            at = data.pop("at")
            found.append(
                {"number": int(lines["id"]), "at": at, "name": lines["event"], "data": data}
            )
    return found


def _empty(store: ServiceStore) -> None:
    tables = MetaData()
    tables.reflect(store.engine)
    with store.engine.begin() as database:
        for table in reversed(tables.sorted_tables):
            if table.name != "alembic_version":
                database.execute(table.delete())


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'jobs.sqlite'}"
    else:
        with postgres_server() as server:
            yield server.new_database()


def test_jobs_live_as_documented(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    store = ServiceStore(url, clock)
    limits = RequestLimits(queued=QUEUED, running=RUNNING, uploads=UPLOADS)
    app = create_app(Service(store, limits, webhooks=Webhooks((ORIGIN,), SECRET)))
    with TestClient(app, raise_server_exceptions=False) as client:

        class Here(Life):
            pass

        Here.store, Here.clock, Here.client = store, clock, client
        Here.post = staticmethod(lambda post: monkeypatch.setattr(webhooks, "post", post))
        run_state_machine_as_test(
            Here, settings=examples(150, quick=5, stateful_step_count=60, phases=UNSHRUNK)
        )
    store.close()


def test_a_cost_is_that_of_its_plan(url: str) -> None:
    """By the times of the request's layers; the same wherever it is told."""
    store = ServiceStore(url)
    app = create_app(Service(store, open_to_all=True))
    with TestClient(app, "http://127.0.0.1") as client:
        job = client.post("/v1/plan", content=json.dumps(PLAN)).json()["id"]
        claimed = Queue(store).claim("w", LEASE)
        assert claimed is not None
        request: Any = parse_request("plan", claimed.request)
        Queue(store).finish(job, "w", outcome_of(plan_now(request)))
        found, plan, answer, shown = (
            client.get(f"/v1/jobs/{job}{path}").json()
            for path in ("", "/plan", "/answer", "/timeline")
        )
    store.close()
    require_timetable(plan)
    assert found["cost"] == max(one["finish_seconds"] for one in plan["schedule"]["actions"])
    assert found["cost"] == answer["cost_seconds"]
    assert shown["timeline"]["end"] == pytest.approx(1e3 * found["cost"])
    assert found["bound"] == answer["bound_seconds"]
    assert found["bound"] <= found["cost"]


def require_timetable(plan: dict[str, Any]) -> None:
    """Forwards and backwards last as the layers do, and none overlap on a device."""
    ends: dict[str, float] = {}
    for one in plan["schedule"]["actions"]:
        named = re.fullmatch(r"(\d+)([FB])(\d+)", one["action"])
        if named is None:
            continue
        stage = plan["stages"][int(named[1])]
        name = {"F": "forward_seconds", "B": "backward_seconds"}[named[2]]
        layers = PLAN["chain"]["layers"][slice(*stage["layers"])]
        seconds = sum(each["costs"][0][name] for each in layers) / len(stage["devices"])
        assert one["finish_seconds"] - one["start_seconds"] == pytest.approx(seconds)
        assert one["start_seconds"] >= ends.get(one["device"], 0.0)
        ends[one["device"]] = one["finish_seconds"]
    assert set(ends) == {device for stage in plan["stages"] for device in stage["devices"]}
