"""What a use case refuses, validation refuses in the same line; what is valid is answered."""

import json
import threading
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from profiles import by_profile

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from fastapi.testclient import TestClient

from stagewright import load_partition_problem
from stagewright.formulations.forms.answers import silent
from stagewright.graphs.documents.errors import InputError
from stagewright.service.http.app import OWN, create_app
from stagewright.service.http.guard import Service
from stagewright.service.http.problems import in_fields
from stagewright.service.jobs.kinds import KINDS, parse_request
from stagewright.service.jobs.store import ServiceStore

Place = tuple[str | int, ...]
BROKEN: list[tuple[str, dict[Place, Any], str]] = [
    ("divide", {("workload", "edges", 2, "destId"): 99},
     "workload: edges[2] names node 99, which does not exist"),
    ("divide", {("workload", "nodes", 1, "id"): 0}, "workload: two nodes have the same id"),
    ("divide", {("workload", "nodes"): [], ("workload", "edges"): []},
     "there must be a part and a device"),
    ("divide", {("workload", "maxFPGAs"): 0}, "there must be a part and a device"),
    ("divide", {("workload", "maxFPGAs"): -1}, "workload.maxFPGAs: Input should be greater than"),
    ("divide", {("workload", "maxFPGAs"): 10**9}, "workload.maxFPGAs: Input should be less than"),
    ("divide", {("workload", "nodes", 0, "fpgaLatency"): float("nan")},
     "workload.nodes[0].fpgaLatency: Input should be a finite number"),
    ("divide", {("workload", "nodes", n, "fpgaLatency"): 1.7e308 for n in range(6)}
     | {("workload", "nodes", n, "isBackwardNode"): False for n in range(6)}
     | {("objective",): "latency", ("workload", "edges", 0, "cost"): -1.0},
     "workload.edges[0].cost: Input should be greater than or equal to 0"),
    ("divide", {("workload", "nodes", 0, "supportedOnFpga"): False},
     "'embedding' does not run on an accelerator"),
    ("divide", {("samples",): 4}, "samples is for Piper's workloads"),
    ("divide", {("objective",): "latency", ("replicas",): 2},
     "replicas does not apply to the objective 'latency'"),
    ("divide", {("replicas",): 2}, "replicas exchange gradients: give the bandwidth"),
    ("jobshop", {("jobs",): []}, "a job shop needs at least one job"),
    ("jobshop", {("jobs", 0): []}, "job 0 needs at least one step"),
    ("jobshop", {("jobs", 0, 1): []}, "job 0, step 1 needs a machine"),
    ("jobshop", {("jobs", 0, 0, 1): -3}, "job 0, step 0: machine and duration must not be"),
    ("jobshop", {("jobs", 0, 0): [[0, 3], [0, 4]]}, "job 0, step 0 has machine 0 twice"),
    ("jobshop", {("jobs", 0, 0, 1): 2**60}, "the durations add up to"),
    ("jobshop", {("backend",): "nowhere"}, "backend 'nowhere' is unknown; use"),
    ("jobshop", {("backend",): "highs", ("jobs", 0, 0): [[0, 3], [1, 3]]},
     "backend 'highs' takes no choice of machines; use cp-sat"),
    ("schedule", {("forward",): []}, "stages must be at least 1, got 0"),
    ("schedule", {("backend",): "cvxpy-convex"}, "backend 'cvxpy-convex' solves no schedules"),
    ("compare-schedules", {("backend",): "nowhere"}, "backend 'nowhere' is unknown"),
    ("schedule-curve", {("backend",): "nowhere"}, "backend nowhere takes neither memory nor"),
    ("allocate", {("workload", "jobs", 0, "model"): "nowhere"}, "no throughput of 'nowhere' on"),
    ("allocate", {("workload", "throughputs", "alone"): []}, "neither throughputs nor trainings"),
    ("allocate", {("pool", "accelerators", 0, "name"): "nowhere"}, "unknown accelerator 'nowhere'"),
    ("allocate", {("policy",): "nowhere"}, "unknown policy 'nowhere'; there are max-min"),
    ("allocate", {("policy",): "min-cost", ("pool", "accelerators", 0, "dollars_per_hour"): None},
     "accelerator 'v100' has no price"),
    ("allocate", {("policy",): "makespan-budget"}, "makespan-budget needs a budget"),
    ("allocate", {("budget_dollars",): 3.0}, "policy 'max-min' spends no budget"),
    ("allocate", {("parts",): 99}, "parts: from 1 to the number of jobs, 8, got 99"),
    ("allocate", {("workload", "jobs", 0, "weight"): 1e30}, "workload: job "),
    ("rounds", {("workload", "jobs", 0, "model"): "nowhere"}, "no throughput of 'nowhere' on"),
    ("rounds", {("policy",): "nowhere"}, "unknown policy 'nowhere'"),
    ("simulate-cluster", {("policy",): "nowhere"}, "unknown policy 'nowhere'"),
    ("simulate-cluster", {("workload", "jobs", 0, "model"): "nowhere"}, "no throughput of"),
    ("simulate-cluster", {("workload", "jobs", 0, "steps"): 1e30}, "the jobs need more than"),
    ("simulate-cluster", {("workload", "jobs", -1, "arrival_seconds"): 1e30}, "workload.jobs[7]"),
    ("cloud", {("rates", "v100"): 0.0}, "strategy '1xv100' finds no instance in aws us-east-1"),
    ("cloud", {("rates", "a100"): 1.0}, "no instance has GPUs of kind 'a100'"),
    ("cloud", {("rates",): {}}, "no instance has a rate above zero"),
    ("cloud", {("start_seconds",): 0.0}, "price"),
    ("place", {("planner",): "nowhere"}, "unknown planner 'nowhere'"),
    ("place", {("cluster", "devices", 0, "kind"): "nowhere"}, "graph "),
    ("partition", {("backend",): "nowhere"}, "backend 'nowhere' is none of recurrence"),
    ("plan", {("planner",): "nowhere"}, "unknown planner 'nowhere'; there are spp"),
    ("plan", {("group_size",): 2}, "planner 'auto' does not support a group size"),
    ("plan", {("planner",): "2bw", ("group_size",): 99}, "group size 99: a stage can have 1 to"),
    ("plan", {("planner",): "madpipe", ("period_seconds",): 1e-9}, "the period 1e-09 s is below"),
    ("plan", {("batch",): 1}, "a batch of 1 samples is no whole number"),
    ("plan", {("tensor",): 2}, "layer "),
    ("plan", {("order",): {"kind": "1f1b-rr", "replicas": [99]}}, "replicas 99 are 99 devices"),
    ("plan", {("runtime",): "nowhere"}, "'nowhere'"),
    ("what-if", {("planner",): "nowhere"}, "unknown planner 'nowhere'"),
    ("sweep", {("batches",): [1], ("microbatches",): []}, "a batch of 1 samples is no"),
]  # fmt: skip
"""A kind of job, what is changed in its example, and what the refusal begins with or names."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    store = ServiceStore(f"sqlite:///{tmp_path_factory.mktemp('jobs') / 'jobs.sqlite'}")
    with TestClient(create_app(Service(store, open_to_all=True)), "http://127.0.0.1") as found:
        yield found
    store.close()


def example(kind: str, changes: dict[Place, Any]) -> str:
    """The page's example of a kind with other values at some places."""
    body = json.loads(files(OWN).joinpath(f"example-{kind}.json").read_text())
    for path, value in changes.items():
        node = body
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
    return json.dumps(body)


def answer(kind: str, text: str) -> None:
    KINDS[kind].answer(parse_request(kind, text), silent, threading.Event())


@pytest.mark.parametrize(
    ("kind", "changes", "line"), BROKEN, ids=[f"{kind}-{n}" for n, (kind, *_) in enumerate(BROKEN)]
)
def test_validation_refuses_as_the_use_case_does(
    client: TestClient, kind: str, changes: dict[Place, Any], line: str
) -> None:
    text = example(kind, changes)
    with pytest.raises(InputError) as caught:
        answer(kind, text)
    response = client.post(f"/v1/{kind}/validate", content=text)
    assert response.status_code == 422, response.text
    assert response.json()["detail"] == in_fields(str(caught.value))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_is_refused_in_the_line_of_a_request(client: TestClient, tmp_path: Path) -> None:
    text = example("divide", {("workload", "edges", 2, "destId"): 99})
    (tmp_path / "w.json").write_text(json.dumps(json.loads(text)["workload"]))
    with pytest.raises(InputError) as caught:
        load_partition_problem(tmp_path / "w.json")
    told = client.post("/v1/divide/validate", content=text).json()["detail"]
    assert str(caught.value) == told.replace("workload", str(tmp_path / "w.json"), 1)


def places(node: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """The path and value of everything in a JSON value; of a list the first and the last."""
    inner = node.items() if isinstance(node, dict) else ((i, node[i]) for i in {0, len(node) - 1})
    for key, value in inner:
        yield (*path, key), value
        if isinstance(value, dict | list) and value:
            yield from places(value, (*path, key))


def others(value: Any) -> list[Any]:
    """Values that may stand in its place."""
    if isinstance(value, list):
        return [[], [*value, *value[:1]], value[1:]]
    if isinstance(value, str):
        return ["nowhere", ""]
    return [0, -1, 1e30, float("nan"), 1e-300, 3]


@pytest.mark.parametrize("kind", ["divide", "jobshop", "allocate", "rounds", "cloud"])
def test_what_is_valid_is_answered(client: TestClient, kind: str) -> None:
    whole = json.loads(example(kind, {}))
    limit: dict[Place, Any] = {("time_limit",): 0.2} if "time_limit" in whole else {}
    changes = [{path: one} for path, value in places(whole) for one in others(value)]
    step, valid = by_profile(8, 1), 0
    for change in changes[::step]:
        text = example(kind, limit | change)
        if client.post(f"/v1/{kind}/validate", content=text).status_code == 200:
            answer(kind, text)
            valid += 1
    assert valid >= len(changes) // step // 8
