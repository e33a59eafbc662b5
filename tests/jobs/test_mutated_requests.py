"""Requests that are changed anywhere are taken or refused in one line, and nothing else happens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_jobs import TWO_JOBS, plan_request
from profiles import examples

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from fastapi.testclient import TestClient

from stagewright.service.http.app import create_app
from stagewright.service.http.guard import Service
from stagewright.service.jobs.kinds import KINDS
from stagewright.service.jobs.store import ServiceStore

BODIES = {"plan": json.loads(plan_request()), "jobshop": json.loads(TWO_JOBS)}
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5),
    st.sampled_from(["../../etc/passwd", "os:system", "a" * 5000, "\ud800", -1, 0, 1e308]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a JSON value but the value itself."""
    inner = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in inner:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@st.composite
def mutated(draw: st.DrawFn, kind: str) -> str:
    """A request with up to three places replaced, deleted or added to."""
    body = json.loads(json.dumps(BODIES[kind]))
    for _ in range(draw(st.integers(1, 3))):
        known = list(places(body))
        if not known:
            break
        path = draw(st.sampled_from(known))
        node = body
        for key in path[:-1]:
            node = node[key]
        if draw(st.booleans()):
            node[path[-1]] = draw(VALUES)
        elif isinstance(node, dict):
            del node[path[-1]]
        else:
            node.append(draw(VALUES))
    return json.dumps(body)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder: Path = tmp_path_factory.mktemp("jobs")
    store = ServiceStore(f"sqlite:///{folder / 'jobs.sqlite'}")
    app = create_app(Service(store, open_to_all=True))
    with TestClient(app, "http://127.0.0.1", raise_server_exceptions=False) as found:
        yield found
    store.close()


def require_one_line(response: Any) -> None:
    assert response.status_code in (200, 202, 404, 409, 413, 422), response.text
    if response.status_code >= 400:
        assert response.headers["content-type"] == "application/problem+json"
        assert "\n" not in response.json()["detail"]
        assert "Traceback" not in response.text


@pytest.mark.parametrize("kind", BODIES)
@examples(5000, quick=60)
@given(data=st.data())
def test_changed_requests_are_taken_or_refused(client: TestClient, kind: str, data: Any) -> None:
    body = data.draw(mutated(kind))
    validated = client.post(f"/v1/{kind}/validate", content=body)
    require_one_line(validated)
    submitted = client.post(f"/v1/{kind}", content=body)
    require_one_line(submitted)
    assert (validated.status_code == 200) == (submitted.status_code in (200, 202))


@examples(500, quick=40)
@given(
    kind=st.sampled_from([*KINDS, "jobs", "../jobs", "nothing", ""]),
    body=st.binary(max_size=300) | VALUES.map(lambda one: json.dumps(one).encode()),
)
def test_any_bytes_are_refused(client: TestClient, kind: str, body: bytes) -> None:
    response = client.post(f"/v1/{kind}", content=body)
    if response.status_code != 405:  # of a path that is only read
        require_one_line(response)


@examples(500, quick=40)
@given(
    job=st.text(max_size=40).filter(lambda text: text.strip(" ./") != ""),
    rest=st.sampled_from(["", "/answer", "/plan", "/events", "/export/megatron", "/history"]),
    header=st.text("0123456789abcdefxyz-", max_size=30),
)
def test_no_job_is_found_by_any_other_text(
    client: TestClient, job: str, rest: str, header: str
) -> None:
    from urllib.parse import quote

    where = f"/v1/jobs/{quote(job, safe='')}{rest}"
    response = client.get(where, headers={"Last-Event-ID": header})
    assert response.status_code in (404, 422), response.text
