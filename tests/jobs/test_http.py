"""The HTTP interface: what is answered, refused, shown to whom; without workers."""

import asyncio
import io
import json
import re
import threading
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
from asking import asked, scope_of
from planning_jobs import TWO_JOBS, TWO_OPERATORS, Clock, plan_request

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from fastapi.testclient import TestClient
from sqlalchemy import event

from stagewright.formulations.forms.answers import silent
from stagewright.graphs.documents.documents import to_json
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.service.http import limits as rates
from stagewright.service.http.app import HEADERS, create_app
from stagewright.service.http.guard import Service
from stagewright.service.http.limits import RequestLimits, RequestRate
from stagewright.service.http.tokens import Scope, Tokens
from stagewright.service.jobs.kinds import KINDS, parse_request
from stagewright.service.jobs.queue import Queue
from stagewright.service.jobs.records import JobEnd, State
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.workers.processes import outcome_of

LOCAL = "http://127.0.0.1:8754"


@pytest.fixture
def client(store: ServiceStore) -> Iterator[TestClient]:
    """A client of a service that is open to this machine alone."""
    limits = RequestLimits(body_bytes=200_000, seconds=60.0, devices=10)
    app = create_app(Service(store, limits, open_to_all=True))
    with TestClient(app, LOCAL, raise_server_exceptions=False) as found:
        yield found


def solved(store: ServiceStore, job: str) -> None:
    """Answer a queued job in this process."""
    queue = Queue(store)
    claimed = queue.claim("w", 60.0)
    assert claimed is not None
    assert claimed.id == job
    request = parse_request(claimed.kind, claimed.request)
    answer = KINDS[claimed.kind].answer(request, silent, threading.Event())
    queue.finish(job, "w", outcome_of(answer))


def told(response: Any, status: int) -> str:
    """The one line of a problem."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    found = response.json()
    assert found["status"] == status
    assert "\n" not in found["detail"]
    return str(found["detail"])


def test_a_plan_from_its_submission_to_its_files(client: TestClient, store: ServiceStore) -> None:
    made = client.post("/v1/plan", content=plan_request(), headers={"Idempotency-Key": "k"})
    assert made.status_code == 202
    job = made.json()["id"]
    assert made.headers["location"] == f"/v1/jobs/{job}"
    assert made.json()["title"] == "small on small"
    again = client.post("/v1/plan", content=plan_request(), headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()["id"]) == (200, job)
    other = client.post("/v1/plan", content=plan_request(seed=1), headers={"Idempotency-Key": "k"})
    assert "belongs to another request" in told(other, 409)
    assert "no answer yet" in told(client.get(f"/v1/jobs/{job}/answer"), 409)
    assert "no plan yet" in told(client.get(f"/v1/jobs/{job}/plan"), 404)
    solved(store, job)
    found = client.get(f"/v1/jobs/{job}").json()
    assert found["state"] in ("optimal", "feasible")
    answer = client.get(f"/v1/jobs/{job}/answer").json()
    assert answer["cost_seconds"] == found["cost"]
    assert client.get(f"/v1/jobs/{job}/plan").json()["format"] == "stagewright-plan"
    assert client.get(f"/v1/jobs/{job}/timeline.png").content.startswith(b"\x89PNG")
    shown = client.get(f"/v1/jobs/{job}/timeline").json()
    assert shown["timeline"]["lanes"]
    assert any("bottleneck" in one for one in shown["sentences"])
    packed = client.get(f"/v1/jobs/{job}/export/deepspeed")
    names = zipfile.ZipFile(io.BytesIO(packed.content)).namelist()
    assert sorted(names) == ["ds_config.json", "stagewright_pipeline.py"]
    assert "is not known" in told(client.get(f"/v1/jobs/{job}/export/jax"), 422)
    trace = client.get(f"/v1/jobs/{job}/trace")
    assert trace.headers["content-disposition"] == 'attachment; filename="trace.json"'
    assert {one["ph"] for one in trace.json()["traceEvents"]} == {"M", "X"}
    page = client.get(f"/v1/jobs/{job}/timeline.html")
    assert page.headers["content-disposition"].startswith("attachment")
    assert page.text.startswith("<!DOCTYPE html>")
    difference = client.get("/v1/diff", params={"first": job, "second": job}).json()
    assert difference["changes"] == []
    assert json.loads(client.get(f"/v1/jobs/{job}/request").text) == json.loads(plan_request())
    # The same request of anybody is answered at once.
    cached = client.post("/v1/plan", content=plan_request(seed=0))
    assert cached.status_code in (200, 202)


def test_a_placement_is_drawn_and_fetched_as_a_plan_is(
    client: TestClient, store: ServiceStore
) -> None:
    cluster = uniform_servers(1, 2, Link(1e9), kind="v100", memory_bytes=1e10)
    documents = {"graph": TWO_OPERATORS, "cluster": cluster}
    given = {name: json.loads(to_json(one)) for name, one in documents.items()}
    made = client.post("/v1/place", json=given | {"planner": "heft"})
    job = made.json()["id"]
    assert "no plan yet" in told(client.get(f"/v1/jobs/{job}/timeline.png"), 404)
    solved(store, job)
    plan = client.get(f"/v1/jobs/{job}/plan").json()
    assert plan["format"] == "stagewright-operators"
    (drawn,) = client.get(f"/v1/jobs/{job}/figures").json()["timelines"]
    assert sum(len(lane["length"]) for lane in drawn["timeline"]["lanes"]) == 2
    assert client.get(f"/v1/jobs/{job}/timeline.png").content.startswith(b"\x89PNG")
    assert "two on" in client.get(f"/v1/jobs/{job}/timeline.html").text
    events = client.get(f"/v1/jobs/{job}/trace").json()["traceEvents"]
    assert {one["name"] for one in events if one["ph"] == "X"} == {"a", "b"}
    for path in ("timeline", "export/torchrun"):
        assert "is one of operators" in told(client.get(f"/v1/jobs/{job}/{path}"), 404)


LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000,
    "num_hidden_layers": 16, "num_attention_heads": 32,
}  # fmt: skip
TRAINING = {"config": LLAMA, "device": "h100", "gpus": 8, "global_batch": 16, "sequence": 2048}


def test_a_configuration_is_planned_explained_fetched_and_exported(
    client: TestClient, store: ServiceStore
) -> None:
    few = {"tensor": [1], "pipeline": [1, 2], "by_stage": False, "framework": "megatron"}
    asked = TRAINING | few | {"explain": "p2 d4 zero1"}
    made = client.post("/v1/train-plan", json=asked).json()
    assert made["title"] == "llama on 8 h100"
    job = made["id"]
    solved(store, job)
    found = client.get(f"/v1/jobs/{job}").json()
    assert (found["state"], found["cost"]) == ("optimal", pytest.approx(found["bound"]))
    layout = client.get(f"/v1/jobs/{job}/plan")
    assert layout.headers["content-disposition"] == 'attachment; filename="layout.json"'
    assert layout.json()["iteration_seconds"] == found["cost"]
    shown = client.get(f"/v1/jobs/{job}/figures").json()
    assert shown["lead"][0] == "Why not p2 t1 d4 b1 zero1?"
    assert sum(percent for _, percent, _ in shown["memory"][0]["parts"]) <= 100
    packed = client.get(f"/v1/jobs/{job}/export/megatron").content
    names = zipfile.ZipFile(io.BytesIO(packed)).namelist()
    assert len(names) > 1
    # The whole problem asks the same, and the memory of its layout is what it says.
    request = parse_request("train-plan", json.dumps(asked))
    again = client.post("/v1/train-plan/validate", content=request.model_dump_json(by_alias=True))
    assert again.json() == {"valid": True}
    text = {"layout": client.get(f"/v1/jobs/{job}/answer").json()["rows"][0]["layout"]}
    given = {name: TRAINING[name] for name in ("config", "device", "sequence", "global_batch")}
    held = client.post("/v1/memory", json=given | text | {"framework": "megatron"}).json()["id"]
    solved(store, held)
    peaks = [one["total_bytes"] for one in client.get(f"/v1/jobs/{held}/answer").json()["ranks"]]
    assert max(peaks) == pytest.approx(sum(layout.json()["memory"][0].values()), rel=1e-9)


def test_a_round_is_fetched_with_its_launch_files(client: TestClient, store: ServiceStore) -> None:
    rates = {"alone": [{"model": "m", "scale": 1, "accelerator": "h100", "steps_per_second": 1.0}]}
    run = {"name": "a", "model": "m", "steps": 10.0, "command": "train"}
    asked = {"workload": {"jobs": [run], "throughputs": rates}, "rounds": 1}
    asked["pool"] = {"accelerators": [{"name": "h100", "count": 2, "per_server": 1}]}
    plain, job = (
        client.post("/v1/rounds", json=asked | more).json()["id"] for more in ({}, {"to": "slurm"})
    )
    assert "no launch files yet" in told(client.get(f"/v1/jobs/{job}/round.zip"), 404)
    solved(store, plain)
    solved(store, job)
    assert "no launch files" in told(client.get(f"/v1/jobs/{plain}/round.zip"), 404)
    shown = [client.get(f"/v1/jobs/{one}/figures").json() for one in (plain, job)]
    assert [one["folder"] for one in shown] == ["", "round"]
    assert shown[1]["lead"][0] == "The first round, for slurm"
    assert shown[1]["lead"][3] == "starts: a"
    packed = zipfile.ZipFile(io.BytesIO(client.get(f"/v1/jobs/{job}/round.zip").content))
    assert {*packed.namelist()} == {"a/job.sbatch", "round.sh", "round.json"}
    after = json.loads(packed.read("round.json"))
    again = client.post("/v1/rounds", json=asked | {"to": "slurm", "after": after}).json()["id"]
    solved(store, again)
    assert client.get(f"/v1/jobs/{again}/answer").json()["launch"]["stays"] == ["a"]
    refusal = client.post("/v1/rounds/validate", json=asked | {"to": "kueue"})
    assert "queue: kueue needs the name of the local queue" in refusal.text


def test_a_tuning_is_begun_told_of_runs_and_fetched(
    client: TestClient, store: ServiceStore
) -> None:
    few = {"tensor": [1], "pipeline": [1, 2], "candidates": 4, "parallel": 2}
    begun = client.post("/v1/tune", json=TRAINING | few).json()
    job = begun["id"]
    assert begun["title"] == "llama on 8 h100"
    assert "no tuning yet" in told(client.get(f"/v1/jobs/{job}/tuning.zip"), 404)
    solved(store, job)
    first, second = (one["layout"] for one in client.get(f"/v1/jobs/{job}/answer").json()["next"])
    document = client.get(f"/v1/jobs/{job}/plan")
    assert document.headers["content-disposition"] == 'attachment; filename="tuning.json"'
    packed = zipfile.ZipFile(io.BytesIO(client.get(f"/v1/jobs/{job}/tuning.zip").content))
    folders = {name.partition("/")[0] for name in packed.namelist() if "/" in name}
    assert folders == {one.replace(" ", "-") for one in (first, second)}
    assert packed.read("tuning.json").decode() == document.text

    def read(*trials: str) -> Any:
        return client.post("/v1/tune-read", json={"tuning": document.json(), "trials": trials})

    after = read(f"{first}: out of memory", f"{second}: 0.5", f"{second}: 0.7 s").json()["id"]
    solved(store, after)
    answer = client.get(f"/v1/jobs/{after}/answer").json()
    assert [one["outcome"] for one in answer["tried"]] == ["out of memory", "measured"]
    assert (answer["best"]["layout"], answer["best"]["seconds"]) == (second, 0.7)
    assert second in client.get(f"/v1/jobs/{after}/figures").json()["lead"][1]
    for line, message in (
        (f"{first}: soon", "trials[0]: "), ("d8", "trials[0]: "), (f"{first}: -1", "trials[0]: "),
        ("t3 b1: 1", "trials: p x t x c x d"),
    ):  # fmt: skip
        assert told(read(line), 422).startswith(message)
    forged = document.json() | {"rest_seconds": -1.0}
    refused = client.post("/v1/tune-read", json={"tuning": forged})
    assert told(refused, 422) == "tuning: rest_seconds must be above 0, got -1"


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("tune", {"framework": "plan"}, "framework plan has no launch files"),
        ("train-plan", {"config": None}, "config: send the model's config.json"),
        ("train-plan", {"config": LLAMA | {"model_type": "own"}}, "config: model_type must be one"),
        ("train-plan", {"config": LLAMA | {"num_hidden_layers": 9999}}, "config: at most 2000"),
        ("train-plan", {"device": "/etc/passwd.json"}, "device '/etc/passwd.json' is not known"),
        ("train-plan", {"rates": "/tmp/own.json"}, "rates '/tmp/own.json' are not known"),
        ("train-plan", {"gpus": 12}, "gpus 12 are not whole servers of 8"),
        ("train-plan", {"global_batch": None}, "global_batch is missing"),
        ("train-plan", {"memory": "80"}, "memory '80' has no unit"),
        ("train-plan", {"time_limit": 1e9}, "time_limit: at most 60 here"),
        ("train-plan", {"problem": {}}, "problem: unknown field"),
        ("train-plan", {"explain": "p2 x3"}, "explain: layout word 'x3' is not known"),
        ("memory", {"layout": "t3", "gpus": None}, "gpus: unknown field"),
        ("calibrate", {"runs": [{"layout": "d8", "seconds": 0}]}, "runs[0].seconds: "),
        ("calibrate", {"runs": [{"layout": "d4", "seconds": 1}]}, "runs[0]: p x t x c x d"),
    ],
)
def test_what_is_wrong_with_a_training_is_said_by_its_field(
    client: TestClient, kind: str, changed: dict[str, Any], message: str
) -> None:
    body = TRAINING | changed
    assert told(client.post(f"/v1/{kind}/validate", json=body), 422).startswith(message)


@pytest.fixture
def planned(client: TestClient, store: ServiceStore) -> str:
    """A job that has a plan."""
    job: str = client.post("/v1/plan", content=plan_request()).json()["id"]
    solved(store, job)
    return job


def test_launch_scripts_take_the_options_of_the_command_line(
    client: TestClient, planned: str
) -> None:
    def script(to: str, **options: str | int) -> str:
        packed = client.get(f"/v1/jobs/{planned}/export/{to}", params=options)
        assert packed.status_code == 200, packed.text
        archive = zipfile.ZipFile(io.BytesIO(packed.content))
        return archive.read(archive.namelist()[0]).decode()

    slurm = script("slurm", command="train.py", cpus=4, time="4:00:00", per_server=1)
    for line in ("--nodes=2", "--cpus-per-task=4", "--time=4:00:00"):
        assert f"#SBATCH {line}\n" in slurm
    pod = script("kubernetes", command="train.py", image="team/train:1", per_server=2)
    assert 'image: "team/train:1"' in pod
    assert "--nproc-per-node=2" in script("torchrun", command="train.py 'a b'", per_server=2)
    assert script("deepspeed", partition_only="true")


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("slurm?command=x&image=y&per_server=2", "^image does not apply to slurm$"),
        ("megatron?cpus=1", "^cpus does not apply to megatron$"),
        ("kubernetes?command=x&per_server=2", "^to kubernetes needs image, the container"),
        ("slurm?command=x&per_server=2&time=soon", "^time 'soon' is no time of Slurm"),
        ("slurm?command=x&per_server=2&time=1%0A%23SBATCH", "no time of Slurm"),
        ("slurm?command=x&per_server=2&cpus=0", "query.cpus"),
        ("slurm?command=x&per_server=2&model=/etc/passwd", "query.model"),
        ("torchrun?per_server=2", "needs command, .* command 'stagewright run plan.json --module"),
        ("torchrun?per_server=2&command='", "No closing quotation"),
        ("torchrun?command=x&per_server=100000000000000000000", "query.per_server"),
        ("..%2Fplan", "Not Found"),
    ],
)  # fmt: skip
def test_options_that_an_export_does_not_take_are_named(
    client: TestClient, planned: str, query: str, detail: str
) -> None:
    answer = client.get(f"/v1/jobs/{planned}/export/{query}")
    assert re.search(detail, told(answer, 404 if detail == "Not Found" else 422))


def test_a_job_that_failed_names_fields_not_options(
    client: TestClient, store: ServiceStore
) -> None:
    job = client.post("/v1/jobshop", content=TWO_JOBS).json()["id"]
    queue = Queue(store)
    queue.claim("w", 60.0)
    reason = "plan with --planner spp; profile --tensor measures others"
    queue.finish(job, "w", JobEnd(State.FAILED, reason=reason))
    found = client.get(f"/v1/jobs/{job}").json()
    assert found["reason"] == "plan with planner spp; profile --tensor measures others"


def test_events_are_replayed_from_any_number(client: TestClient, store: ServiceStore) -> None:
    job = client.post("/v1/plan", content=plan_request()).json()["id"]
    solved(store, job)
    history = client.get(f"/v1/jobs/{job}/history").json()
    assert [one["name"] for one in history][:2] == ["queued", "solving"]

    def stream(**headers: str) -> list[int]:
        text = client.get(f"/v1/jobs/{job}/events", headers=headers).text
        return [int(line[4:]) for line in text.splitlines() if line.startswith("id: ")]

    numbers = [one["number"] for one in history]
    assert stream() == numbers
    assert stream(**{"Last-Event-ID": str(numbers[0])}) == numbers[1:]
    assert stream(**{"Last-Event-ID": "x"}) == numbers


def test_verbs_are_different(client: TestClient, store: ServiceStore) -> None:
    job = client.post("/v1/plan", content=plan_request()).json()["id"]
    assert "stop it first" in told(client.post(f"/v1/jobs/{job}/discard"), 409)
    assert client.delete(f"/v1/jobs/{job}").json()["stopped_by"] == "user"
    assert "has ended" in told(client.post(f"/v1/jobs/{job}/abort"), 409)
    assert client.post(f"/v1/jobs/{job}/retry").json()["state"] == "queued"
    assert client.post(f"/v1/jobs/{job}/abort").json()["state"] == "failed"
    assert client.post(f"/v1/jobs/{job}/discard").status_code == 204
    assert "there is no job" in told(client.get(f"/v1/jobs/{job}"), 404)


OTHER = json.loads(plan_request())["cluster"]  # where a model belongs


@pytest.mark.parametrize(
    ("path", "body", "status", "detail"),
    [
        ("/v1/plan", "{", 422, "EOF"),
        ("/v1/plan", "[]", 422, "should be an object"),
        ("/v1/plan", plan_request(microbatches=0), 422, "microbatches must be at least 1"),
        ("/v1/plan", plan_request(time_limit=61.0), 422, "time_limit: at most 60 here"),
        ("/v1/plan", plan_request(nothing=1), 422, "nothing"),
        ("/v1/plan", plan_request(chain=OTHER), 422, "'stagewright-model', got 'stagewright-cl"),
        ("/v1/plan/validate", plan_request(microbatches="2"), 422, "microbatches"),
        ("/v1/plan", " " * 200_001, 413, "more than 200000 bytes"),
        ("/v1/plan", "[" * 100_000, 422, "100000 brackets inside each other, over 32"),
        ("/v1/plan", '{"chain": "]]]]]", "cluster": ' + "[" * 32, 422, "33 brackets"),
        ("/v1/plan", '"' + r'\"' * 50_000, 422, "EOF"),
        ("/v1/jobshop", f'{{"jobs":[{"[[0,1]]," * 10_000}[[0,1]]]}}', 422, "10000 operations here"),
        ("/v1/jobshop", '{"jobs": 1}', 422, "jobs"),
        ("/v1/nothing", "{}", 404, "Not Found"),
        ("/v1/plan?priority=x", plan_request(), 422, "priority"),
    ],
)  # fmt: skip
def test_bad_requests_are_one_line(
    client: TestClient, store: ServiceStore, path: str, body: str, status: int, detail: str
) -> None:
    assert detail in told(client.post(path, content=body), status)
    assert store.counts() == {}


def test_a_request_is_validated_without_solving(client: TestClient, store: ServiceStore) -> None:
    assert client.post("/v1/jobshop/validate", content=TWO_JOBS).json() == {"valid": True}
    assert store.counts() == {}


def test_every_kind_is_described(client: TestClient) -> None:
    document = client.get("/v1/openapi.json").json()
    for kind in KINDS:
        body = document["paths"][f"/v1/{kind}"]["post"]["requestBody"]
        schema = body["content"]["application/json"]["schema"]
        for form in schema.get("anyOf", [schema]):
            *_, name = form["$ref"].split("/")
            assert document["components"]["schemas"][name]["properties"]


def test_headers_close_the_service(client: TestClient) -> None:
    response = client.get("/health/ready")
    assert response.json() == {"status": "ready"}
    for name, value in HEADERS.items():
        assert response.headers[name] == value
    assert "access-control-allow-origin" not in response.headers


def test_other_sites_in_the_same_browser_are_refused(
    client: TestClient, store: ServiceStore
) -> None:
    for site in ("cross-site", "same-site"):
        response = client.post("/v1/jobshop", content=TWO_JOBS, headers={"Sec-Fetch-Site": site})
        assert "other sites" in told(response, 403)
    for host in (
        "evil.example:8754", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "[", "", "[::1",
        "127.0.0.1:8754:1", "evil.example\\\\127.0.0.1", "127.0.0.1:x", "127.0.0.2",
    ):  # fmt: skip
        renamed = client.post("/v1/jobshop", content=TWO_JOBS, headers={"Host": host})
        assert told(renamed, 403).endswith("at 127.0.0.1, localhost, ::1 alone")
    assert store.counts() == {}
    for host in ("127.0.0.1", "localhost:8754", "LOCALHOST", "[::1]:8754"):
        assert client.get("/v1/jobs", headers={"Host": host}).status_code == 200
    same = client.post("/v1/jobshop", content=TWO_JOBS, headers={"Sec-Fetch-Site": "same-origin"})
    assert same.status_code == 202


def test_a_body_that_does_not_arrive_is_not_waited_for(store: ServiceStore) -> None:
    limits = RequestLimits(body_seconds=0.05)
    app = create_app(Service(store, limits, open_to_all=True))
    part = {"type": "http.request", "body": b'{"jobs', "more_body": True}
    late, early = [part], [part, {"type": "http.disconnect"}]
    for messages, status, detail in (
        (late, 408, "the body was not received within 0.05 s"),
        (early, 400, "the body ends too early"),
    ):
        scope = scope_of("/v1/jobshop", [("Host", "127.0.0.1")], "127.0.0.1", "POST")
        found = asyncio.run(asked(app, scope, *messages))
        assert (found.status, json.loads(found.body)["detail"]) == (status, detail)
    assert store.counts() == {}


def test_an_error_of_ours_is_a_problem_without_its_place(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(ServiceStore, "ping", fail)
    response = client.get("/health/ready")
    assert "its log says more" in told(response, 500)
    assert "secret" not in response.text


@pytest.mark.parametrize("number", ["9" * 30, "9" * 5000, "-1", "1.5", str(2**63), "\u0663"])
def test_numbers_of_events_that_no_database_has(
    client: TestClient, planned: str, number: str
) -> None:
    headers = {"Last-Event-ID": number.encode()}
    assert "id: " in client.get(f"/v1/jobs/{planned}/events", headers=headers).text
    where = f"/v1/jobs/{planned}/history"
    assert "after" in told(client.get(where, params={"after": number}), 422)


def test_a_store_that_takes_no_jobs_is_not_ready(client: TestClient, store: ServiceStore) -> None:
    assert client.get("/health/ready").status_code == 200

    @event.listens_for(store.engine, "checkout")
    def read_only(connection: Any, *_: Any) -> None:
        connection.execute("PRAGMA query_only=ON")

    assert "does not answer" in told(client.get("/health/ready"), 503)
    assert client.get("/health/live").status_code == 200


def test_a_store_that_does_not_answer_is_said(client: TestClient, store: ServiceStore) -> None:
    with store.engine.begin() as database:
        database.exec_driver_sql("DROP TABLE events")
    response = client.post("/v1/jobshop", content=TWO_JOBS)
    assert "does not answer" in told(response, 503)
    assert response.headers["retry-after"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("[[],{}]", "3 lists and objects, over 2"),
        ("[1,2,3,4,5]", "4 values, over 3"),
        ('["a" "b" "c" "d"]', "4 texts, over 3"),
        ('["[[[,,,,,"]', None),
    ],
)
def test_a_body_of_many_parts_is_refused_unread(body: str, told: str | None) -> None:
    limits = RequestLimits(parts=2, values=3)
    if told is None:
        limits.require_small(body.encode())
    else:
        with pytest.raises(InputError, match=told):
            limits.require_small(body.encode())


@pytest.mark.parametrize("kind", ["plan", "sweep"])
def test_layers_are_counted_before_they_are_read(kind: str, store: ServiceStore) -> None:
    app = create_app(Service(store, RequestLimits(layers=2), open_to_all=True))
    with TestClient(app, LOCAL) as here:
        many = json.dumps({"chain": {"layers": [None] * 3}})
        detail = told(here.post(f"/v1/{kind}", content=many), 422)
    assert detail == "chain: at most 2 layers here, got 3"


def test_brackets_in_texts_are_not_depth(client: TestClient) -> None:
    deep = json.loads(plan_request())
    deep["chain"]["layers"][0]["name"] = '[{"\\' * 100
    assert client.post("/v1/plan/validate", content=json.dumps(deep)).json() == {"valid": True}


# --- Users ----------------------------------------------------------------------------------------


def test_the_first_token_closes_a_server_that_was_open(
    store: ServiceStore, client: TestClient
) -> None:
    assert client.get("/v1/jobs").status_code == 200
    made = Tokens(store.engine).create("ann", Scope.READ)
    assert "a token is needed" in told(client.get("/v1/jobs"), 401)
    with_token = {"Authorization": f"Bearer {made}"}
    assert client.get("/v1/jobs", headers=with_token).status_code == 200
    Tokens(store.engine).revoke("ann")
    assert client.get("/v1/jobs").status_code == 401


@pytest.fixture
def tokens(store: ServiceStore) -> dict[str, dict[str, str]]:
    """Headers with the token of each user."""
    made = Tokens(store.engine)
    users = {"ann": Scope.SUBMIT, "bob": Scope.SUBMIT, "eve": Scope.READ, "root": Scope.ADMIN}
    return {
        user: {"Authorization": f"Bearer {made.create(user, scope)}"}
        for user, scope in users.items()
    }


@pytest.fixture
def guarded(store: ServiceStore) -> Iterator[TestClient]:
    with TestClient(create_app(Service(store)), raise_server_exceptions=False) as found:
        yield found


def test_users_see_their_own_jobs(guarded: TestClient, tokens: dict[str, dict[str, str]]) -> None:
    ann, bob, eve, root = (tokens[name] for name in ("ann", "bob", "eve", "root"))
    job = guarded.post("/v1/jobshop", content=TWO_JOBS, headers=ann).json()["id"]
    assert guarded.get(f"/v1/jobs/{job}", headers=ann).json()["user"] == "ann"
    for path in ("", "/answer", "/request", "/history", "/events", "/plan"):
        assert "no job" in told(guarded.get(f"/v1/jobs/{job}{path}", headers=bob), 404)
    assert "no job" in told(guarded.delete(f"/v1/jobs/{job}", headers=bob), 404)
    assert guarded.get("/v1/jobs", headers=bob).json()["jobs"] == []
    assert len(guarded.get("/v1/jobs?all_users=true", headers=root).json()["jobs"]) == 1
    assert "admin" in told(guarded.get("/v1/jobs?all_users=true", headers=ann), 403)
    assert "scope submit" in told(guarded.post("/v1/jobshop", content=TWO_JOBS, headers=eve), 403)


def test_a_job_of_another_user_whose_answer_is_known_is_not_named(
    guarded: TestClient, store: ServiceStore, tokens: dict[str, dict[str, str]]
) -> None:
    def submit(user: str) -> Any:
        return guarded.post("/v1/jobshop", content=TWO_JOBS, headers=tokens[user]).json()

    first = submit("ann")["id"]
    queue = Queue(store)
    queue.claim("w", 60.0)
    queue.finish(first, "w", JobEnd(State.OPTIMAL, answer="{}"))
    assert submit("ann")["cached_from"] == first
    known = submit("bob")
    assert (known["state"], known["cached_from"]) == ("optimal", None)
    for user, shown in (("bob", None), ("root", first)):
        headers = tokens[user]
        found = guarded.get(f"/v1/jobs/{known['id']}", headers=headers).json()
        assert found["cached_from"] == shown
    listed = guarded.get("/v1/jobs", headers=tokens["bob"]).json()["jobs"]
    assert [one["cached_from"] for one in listed] == [None]


def operations() -> Iterator[tuple[str, str]]:
    """Method and path of every call that the service describes."""
    for path, methods in create_app(None).openapi()["paths"].items():
        for method in methods:
            yield method.upper(), path


def test_no_call_reaches_the_job_of_another_user(
    guarded: TestClient, store: ServiceStore, tokens: dict[str, dict[str, str]]
) -> None:
    ann, bob = tokens["ann"], tokens["bob"]
    job = guarded.post("/v1/plan", content=plan_request(), headers=ann).json()["id"]
    solved(store, job)
    calls = [(method, path) for method, path in operations() if "{job}" in path]
    assert len(calls) > 15
    options = {"trace": "0" * 64, "command": "x"}
    for method, path in calls:
        for named in (job, job[:31], job.upper(), f"{job} ", f"%00{job}", f"{job}%2f"):
            where = path.format(job=named, to="torchrun")
            response = guarded.request(method, where, headers=bob, params=options)
            assert response.status_code == 404, (method, where, response.text)
    for pair in ((job, job), ("x", job)):
        where = f"/v1/diff?first={pair[0]}&second={pair[1]}"
        assert "no job" in told(guarded.get(where, headers=bob), 404)
    assert store.get(job).document is not None  # type: ignore[union-attr]


def test_every_call_but_those_of_health_needs_a_token(
    guarded: TestClient, tokens: dict[str, dict[str, str]]
) -> None:
    for method, path in operations():
        response = guarded.request(method, path, content="{}")
        if path.startswith("/health/"):
            assert response.status_code == 200, (method, path)
        else:
            assert "a token is needed" in told(response, 401), (method, path)
            assert response.headers["www-authenticate"] == "Bearer"


def test_a_user_has_a_rate_and_a_burst(
    store: ServiceStore, tokens: dict[str, dict[str, str]]
) -> None:
    clock = Clock()
    app = create_app(Service(store, rate=RequestRate(2.0, 3.0, clock)))
    with TestClient(app, raise_server_exceptions=False) as client:

        def statuses(count: int, headers: dict[str, str]) -> list[int]:
            return [client.get("/v1/jobs", headers=headers).status_code for _ in range(count)]

        assert statuses(4, tokens["ann"]) == [200, 200, 200, 429]
        refused = client.post("/v1/jobshop", content=TWO_JOBS, headers=tokens["ann"])
        assert "more than 2 requests a second" in told(refused, 429)
        assert refused.headers["retry-after"] == "1"
        assert statuses(1, tokens["bob"]) == [200]
        clock.now += 0.5
        assert statuses(2, tokens["ann"]) == [200, 429]
        clock.now += 1000.0
        assert statuses(4, tokens["ann"]) == [200, 200, 200, 429]
        # Who runs the service is told of its health.
        assert {client.get("/health/live").status_code for _ in range(5)} == {200}


def test_users_who_do_nothing_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MOST_KNOWN", 3)
    clock = Clock()
    rate = RequestRate(1.0, 2.0, clock)
    for number in range(10):
        rate.take(f"user {number}")
        clock.now += 1.0
    assert len(rate._buckets) <= 3


def test_a_user_has_so_many_jobs_in_the_queue(
    store: ServiceStore, tokens: dict[str, dict[str, str]]
) -> None:
    with TestClient(create_app(Service(store, RequestLimits(queued=2)))) as client:
        for status in (202, 202, 429):
            answer = client.post("/v1/jobshop", content=TWO_JOBS, headers=tokens["ann"])
            assert answer.status_code == status
        assert "you have 2 jobs in the queue" in told(answer, 429)
        assert answer.headers["retry-after"] == "10"
        other = client.post("/v1/jobshop", content=TWO_JOBS, headers=tokens["bob"])
        assert other.status_code == 202


def test_a_full_queue_takes_what_does_not_wait_in_it(
    store: ServiceStore, tokens: dict[str, dict[str, str]]
) -> None:
    ann, known = tokens["ann"], JobEnd(State.OPTIMAL, answer="{}")
    with TestClient(create_app(Service(store, RequestLimits(queued=1)))) as client:

        def submit(path: str, content: str, key: str) -> Any:
            headers = ann | {"Idempotency-Key": key}
            return client.post(f"/v1/{path}", content=content, headers=headers)

        first = submit("jobshop", TWO_JOBS, "first").json()["id"]
        Queue(store).claim("w", 60.0)
        Queue(store).finish(first, "w", known)
        stopped = submit("plan", plan_request(), "stopped").json()["id"]
        client.delete(f"/v1/jobs/{stopped}", headers=ann)
        waiting = submit("plan", plan_request(seed=1), "waiting").json()["id"]
        again = submit("plan", plan_request(seed=1), "waiting")
        assert (again.status_code, again.json()["id"]) == (200, waiting)
        assert "another request" in told(submit("plan", plan_request(seed=2), "waiting"), 409)
        cached = submit("jobshop", TWO_JOBS, "cached")
        assert (cached.status_code, cached.json()["cached_from"]) == (200, first)
        retried = client.post(f"/v1/jobs/{stopped}/retry", headers=ann)
        assert "1 jobs in the queue" in told(retried, 429)
        assert client.get("/v1/jobs?limit=4", headers=ann).json()["next"] is None


def test_a_job_that_is_tried_again_has_no_answer_until_it_ends(
    client: TestClient, store: ServiceStore
) -> None:
    queue = Queue(store)
    job = client.post("/v1/jobshop", content=TWO_JOBS).json()["id"]
    queue.claim("w", 60.0)
    first = JobEnd(State.FEASIBLE, answer="{}", document="first", cost=3.0, bound=1.0)
    queue.finish(job, "w", first)
    client.post(f"/v1/jobs/{job}/retry")
    assert "no answer yet" in told(client.get(f"/v1/jobs/{job}/answer"), 409)
    assert client.get(f"/v1/jobs/{job}/figures").status_code == 404
    queue.claim("v", 60.0)
    queue.finish(job, "v", JobEnd(State.FEASIBLE, answer='{"worse":1}', cost=4.0, bound=1.0))
    assert client.get(f"/v1/jobs/{job}/answer").json() == {}  # as its plan is the first one
    client.post(f"/v1/jobs/{job}/retry")
    queue.claim("u", 60.0)
    queue.improve(job, "u", 2.0, 1.0, "second")
    queue.finish(job, "u", JobEnd(State.FEASIBLE, reason="lost"))
    assert client.get(f"/v1/jobs/{job}").json()["cost"] == 2.0
    assert "no answer" in told(client.get(f"/v1/jobs/{job}/answer"), 404)  # not that of cost 3
    client.post(f"/v1/jobs/{job}/retry")
    assert client.post(f"/v1/jobs/{job}/abort").json()["state"] == "failed"
    assert "no answer" in told(client.get(f"/v1/jobs/{job}/answer"), 404)
