"""Uploaded documents: kept for their user alone, named by requests, compared with plans."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import answered
from planning_jobs import TWO_JOBS, plan_request, traced
from plans import small_problem

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from fastapi.testclient import TestClient

from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.documents import to_json
from stagewright.graphs.machines.devices import accelerator
from stagewright.service.http.app import create_app
from stagewright.service.http.guard import Service
from stagewright.service.http.limits import RequestLimits
from stagewright.service.http.tokens import Scope, Tokens
from stagewright.service.jobs.kinds import parse_request
from stagewright.service.jobs.queue import Queue
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.pipelines.planning import plan as plan_now
from stagewright.service.workers.processes import outcome_of

PROBLEM = small_problem(layers=3, devices=2)
MODEL, CLUSTER = to_json(PROBLEM.chain), to_json(PROBLEM.cluster)
TOPOLOGY = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV2\t0-7\nGPU1\tNV2\t X \t0-7\n"
Headers = dict[str, str]


@pytest.fixture
def client(store: ServiceStore) -> Iterator[TestClient]:
    limits = RequestLimits(body_bytes=200_000, uploads=3)
    with TestClient(create_app(Service(store, limits)), raise_server_exceptions=False) as found:
        yield found


@pytest.fixture
def ann(store: ServiceStore) -> Headers:
    return {"Authorization": f"Bearer {Tokens(store.engine).create('ann', Scope.SUBMIT)}"}


@pytest.fixture
def bob(store: ServiceStore) -> Headers:
    return {"Authorization": f"Bearer {Tokens(store.engine).create('bob', Scope.ADMIN)}"}


def told(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["detail"])


def kept(client: TestClient, path: str, text: str, headers: Headers) -> dict[str, Any]:
    response = client.post(f"/v1/uploads/{path}", content=text, headers=headers)
    assert response.status_code == 201, response.text
    found: dict[str, Any] = response.json()
    assert response.headers["location"] == f"/v1/uploads/{found['id']}"
    return found


def test_uploads_are_listed_read_and_deleted(client: TestClient, ann: Headers) -> None:
    model = kept(client, "model", MODEL, ann)
    assert (model["kind"], model["name"]) == ("model", "small")
    again = client.post("/v1/uploads/model?name=b", content=MODEL, headers=ann)
    assert (again.status_code, again.json()) == (200, model)
    cluster = kept(client, "cluster?name=two%20cards", CLUSTER, ann)
    assert cluster["name"] == "two cards"
    first = client.get("/v1/uploads?limit=1", headers=ann).json()
    assert first == {"uploads": [cluster], "next": cluster["id"]}
    rest = client.get(f"/v1/uploads?before={cluster['id']}", headers=ann).json()
    assert rest == {"uploads": [model], "next": None}
    models = client.get("/v1/uploads?kind=model", headers=ann).json()
    assert models["uploads"] == [model]
    text = client.get(f"/v1/uploads/{model['id']}", headers=ann)
    assert text.json() == json.loads(MODEL)
    assert client.delete(f"/v1/uploads/{model['id']}", headers=ann).status_code == 204
    assert "no upload" in told(client.delete(f"/v1/uploads/{model['id']}", headers=ann), 404)


def test_a_topology_becomes_a_cluster(client: TestClient, ann: Headers) -> None:
    made = kept(client, "topology?device=a100&name=box", TOPOLOGY, ann)
    assert (made["kind"], made["name"]) == ("cluster", "box")
    document = client.get(f"/v1/uploads/{made['id']}", headers=ann).json()
    assert [one["name"] for one in document["devices"]] == ["GPU0", "GPU1"]
    assert document["devices"][0]["memory_bytes"] == accelerator("a100").memory_bytes
    own = kept(
        client, "topology?device=mine&memory=3GB&pcie=5", TOPOLOGY.replace("NV2", "SYS"), ann
    )
    document = client.get(f"/v1/uploads/{own['id']}", headers=ann).json()
    assert {one["memory_bytes"] for one in document["devices"]} == {3e9}
    assert document["links"]["bandwidth_bytes_per_second"][0][1] == 22e9


CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100}


def test_a_configuration_becomes_the_model_of_the_command_line(
    client: TestClient, ann: Headers, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = "--sequence 128 --device h100,a100 --precision bf16 --microbatch-sizes 1,2"
    options += " --rates fsdp-h100"
    answered("model", tmp_path / "config.json", *options.split(), "-o", tmp_path / "own.json")
    query = "sequence=128&device=h100,a100&precision=bf16&microbatch_size=1&microbatch_size=2"
    query += "&rates=fsdp-h100"
    made = kept(client, f"config?{query}", json.dumps(CONFIG), ann)
    assert made["kind"] == "model"
    assert made["name"].startswith("gpt2(")
    document = client.get(f"/v1/uploads/{made['id']}", headers=ann).json()
    assert document == json.loads((tmp_path / "own.json").read_text())


@pytest.mark.parametrize(
    ("query", "text", "detail"),
    [
        ("", CONFIG, "^query.sequence: "),
        ("sequence=9", {}, "^config: model_type must be one of .*; there is no such field$"),
        ("sequence=9", CONFIG | {"model_type": "resnet"}, "^config: model_type must be one of"),
        ("sequence=9", CONFIG | {"n_head": 5}, "^config: n_embd"),
        ("sequence=9", CONFIG | {"n_layer": 2001}, "^config: at most 2000 layers here, got 2001$"),
        ("sequence=9&rates=own.json", CONFIG, "^rates 'own.json' are not known; known are fsdp"),
        ("sequence=9", [], "^config: a configuration is an object"),
        ("sequence=9", "{", "^config: "),
        ("sequence=9&device=/etc/passwd.json", CONFIG, "passwd.json"),
        ("sequence=9&microbatch_size=0", CONFIG, "microbatch"),
        ("sequence=9&precision=int4", CONFIG, "^query.precision"),
    ],
)
def test_what_is_no_configuration_is_refused_in_a_line(
    client: TestClient, ann: Headers, query: str, text: Any, detail: str
) -> None:
    body = text if isinstance(text, str) else json.dumps(text)
    response = client.post(f"/v1/uploads/config?{query}", content=body, headers=ann)
    line = told(response, 422)
    assert re.search(detail, line), line
    assert "\n" not in line


def test_a_configuration_in_the_wrong_place_is_told_the_right_one(
    client: TestClient, ann: Headers
) -> None:
    response = client.post("/v1/uploads/model", content=json.dumps(CONFIG), headers=ann)
    assert "send it to /v1/uploads/config?sequence=TOKENS" in told(response, 422)


def test_a_request_with_uploads_is_the_request_with_the_documents(
    client: TestClient, store: ServiceStore, ann: Headers
) -> None:
    whole = json.loads(plan_request())
    named = whole | {
        field: {"upload": kept(client, kind, json.dumps(whole[field]), ann)["id"]}
        for field, kind in (("chain", "model"), ("cluster", "cluster"))
    }
    one, other = (
        client.post("/v1/plan", content=json.dumps(body), headers=ann) for body in (whole, named)
    )
    jobs = [store.get(response.json()["id"]) for response in (one, other)]
    assert jobs[0].request == jobs[1].request  # type: ignore[union-attr]
    assert jobs[0].digest == jobs[1].digest  # type: ignore[union-attr]
    validated = client.post("/v1/plan/validate", content=json.dumps(named), headers=ann)
    assert validated.json() == {"valid": True}


def test_users_have_their_own_uploads(client: TestClient, ann: Headers, bob: Headers) -> None:
    made = kept(client, "model", MODEL, ann)["id"]
    assert client.get("/v1/uploads", headers=bob).json()["uploads"] == []
    for method in ("GET", "DELETE"):
        response = client.request(method, f"/v1/uploads/{made}", headers=bob)
        assert "no upload" in told(response, 404)
    for upload in (made, made[:10], made.upper(), "../x", "", None, 1, ["a"], "\0", "%"):
        body = plan_request(chain={"upload": upload})
        assert "chain.upload: there is no upload" in told(
            client.post("/v1/plan", content=body, headers=bob), 422
        )
    assert "422" in client.get(f"/v1/uploads/{made[:10]}", headers=ann).text
    assert client.get(f"/v1/uploads/{made}", headers=ann).status_code == 200


@pytest.mark.parametrize(
    ("path", "text", "detail"),
    [
        ("model", CLUSTER, "model: expected a 'stagewright-model' document"),
        ("cluster", "{", "cluster: "),
        ("cluster", "\0", "cluster: "),
        ("trace", '{"format": "stagewright-trace", "version": 1}', "missing field"),
        ("model", "[" * 40, "40 brackets"),
        ("plan", "{}", "path.kind"),
        ("topology?device=a100", "hello", "no output of nvidia-smi topo"),
        ("topology?device=a100", "\udcff", "no text in UTF-8"),
        ("topology", TOPOLOGY, "query.device"),
        ("topology?device=/etc/passwd", TOPOLOGY, "/etc/passwd"),
        ("topology?device=mine&memory=3", TOPOLOGY, "memory '3' has no unit"),
        ("topology?device=mine&memory=-3GB", TOPOLOGY, "3GB"),
        ("topology?device=a100&memory=1e999GB", TOPOLOGY, "1e999GB"),
    ],
)
def test_what_is_no_such_document_is_refused(
    client: TestClient, ann: Headers, path: str, text: str, detail: str
) -> None:
    body = text.encode(errors="surrogateescape")
    response = client.post(f"/v1/uploads/{path}", content=body, headers=ann)
    assert detail in told(response, 422)
    assert client.get("/v1/uploads", headers=ann).json()["uploads"] == []


def test_an_upload_of_another_kind_is_named(client: TestClient, ann: Headers) -> None:
    made = kept(client, "cluster", CLUSTER, ann)["id"]
    response = client.post("/v1/plan", content=plan_request(chain={"upload": made}), headers=ann)
    assert "is a cluster, not a model" in told(response, 422)
    with_both = plan_request(chain={"upload": made, "name": "x"})
    assert told(client.post("/v1/plan", content=with_both, headers=ann), 422)


def test_a_user_has_so_many_uploads(client: TestClient, ann: Headers, bob: Headers) -> None:
    for number in range(3):
        text = to_json(replace(PROBLEM.chain, name=f"m{number}"))
        kept(client, "model", text, ann)
    assert "3 uploads" in told(client.post("/v1/uploads/model", content=MODEL, headers=ann), 409)
    kept(client, "model", MODEL, bob)
    again = client.post("/v1/uploads/model", content=text, headers=ann)
    assert again.status_code == 200  # it is kept already
    whole = client.get("/v1/uploads?limit=3", headers=ann).json()
    assert (len(whole["uploads"]), whole["next"]) == (3, None)


# --- Measured traces ------------------------------------------------------------------------------


def test_a_plan_is_compared_with_its_run(
    client: TestClient, store: ServiceStore, ann: Headers, bob: Headers
) -> None:
    job = client.post("/v1/plan", content=plan_request(), headers=ann).json()["id"]
    queue = Queue(store)
    claimed = queue.claim("w", 60.0)
    assert claimed is not None
    request: Any = parse_request("plan", claimed.request)
    queue.finish(job, "w", outcome_of(plan_now(request)))
    text = client.get(f"/v1/jobs/{job}/plan", headers=ann).text
    run = traced(documents.parse(PipelinePlan, text, "plan"), 2.0)
    trace = kept(client, "trace", to_json(run), ann)["id"]
    where = f"/v1/jobs/{job}/comparison"
    found = client.get(where, params={"trace": trace}, headers=ann).json()
    assert found["iteration_seconds"]["ratio"] == pytest.approx(2.0)
    predicted = client.get(f"/v1/jobs/{job}/timeline", headers=ann).json()["timeline"]
    measured = found["measured"]["timeline"]
    assert measured["end"] == pytest.approx(2.0 * predicted["end"])
    assert [one["name"] for one in measured["lanes"]] == [one["name"] for one in predicted["lanes"]]
    other = kept(client, "trace", to_json(replace(run, digest="0" * 64)), ann)["id"]
    assert "plan" in told(client.get(where, params={"trace": other}, headers=ann), 422)
    model = kept(client, "model", MODEL, ann)["id"]
    assert "not a trace" in told(client.get(where, params={"trace": model}, headers=ann), 422)
    assert "no upload" in told(client.get(where, params={"trace": trace}, headers=bob), 404)
    empty = client.post("/v1/jobshop", content=TWO_JOBS, headers=ann).json()["id"]
    answer = client.get(f"/v1/jobs/{empty}/comparison?trace={trace}", headers=ann)
    assert "no plan yet" in told(answer, 404)
