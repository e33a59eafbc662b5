"""``divide`` on workloads of both projects, and ``import --from piper``."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import answered, answered_json, refused

import stagewright
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.chain import load_model

KILOBYTE = 1e3


def node(number: int, milliseconds: float, size: float, **more: Any) -> dict[str, Any]:
    times = {"fpgaLatency": milliseconds, "cpuLatency": 5 * milliseconds}
    return {"id": number, "name": f"op{number}", "size": size, **times, **more}


def edge(source: int, target: int, milliseconds: float) -> dict[str, Any]:
    return {"sourceId": source, "destId": target, "size": 8.0, "cost": milliseconds}


# A diamond 0 -> (1, 2) -> 3 that takes 4, 3, 3 and 4 ms; 1 ms to send what an operator makes.
OPERATORS = {
    "maxFPGAs": 2, "maxCPUs": 0, "maxSizePerFPGA": 4 * KILOBYTE,
    "nodes": [node(0, 4, KILOBYTE), node(1, 3, KILOBYTE), node(2, 3, KILOBYTE),
              node(3, 4, KILOBYTE)],
    "edges": [edge(0, 1, 1), edge(0, 2, 1), edge(1, 3, 1), edge(2, 3, 1)],
}  # fmt: skip


def way(name: str, seconds: float, flight: float, fw: list[int], bw: list[int]) -> dict[str, Any]:
    return {
        "id": name, "timePerSample": seconds, "parameterSize": 100.0, "memoryUsageA": flight,
        "memoryUsageB": 50.0, "syncTimeFw": {str(i): 0.0 for i in fw},
        "syncTimeBw": {str(i): 0.0 for i in bw},
    }  # fmt: skip


def layer(number: int, fw: list[int], bw: list[int]) -> dict[str, Any]:
    ways = [way("vanilla", 3.0, 200.0, fw, bw), way("activation recomp", 4.0, 20.0, fw, bw)]
    return {"id": number, "name": f"layer{number}", "TMPCs": {"1": ways}}


LAYERS = {
    "maxDevices": 2, "maxMemoryPerDevice": 1000.0, "bandwidth": 1e9, "mbsInBatch": 4,
    "nodes": [layer(0, [], [1]), layer(1, [0], [])],
    "edges": [{"sourceId": 0, "destId": 1, "communicationCost": 10.0}],
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ops.json").write_text(json.dumps(OPERATORS))
    Path("layers.json").write_text(json.dumps(LAYERS))


@pytest.mark.usefixtures("files")
def test_operators_are_divided_as_by_hand() -> None:
    """{0, 1} and {2, 3}: 7 ms, and both send or receive op0's and op1's outputs."""
    found = answered_json("divide", "ops.json")
    assert found["status"] == "optimal"
    assert found["cost_seconds"] == pytest.approx(9e-3)
    assert found["bound_seconds"] == pytest.approx(9e-3)
    assert sorted(len(one["nodes"]) for one in found["sets"]) == [2, 2]
    assert all(one["seconds"] == pytest.approx(9e-3) for one in found["sets"])
    text = answered("divide", "ops.json")
    assert "9 ms between two samples (optimal)" in text
    assert "of all contiguous sets of operators" in text


@pytest.mark.usefixtures("files")
def test_devices_memory_and_hosts_may_differ_from_the_file() -> None:
    assert answered_json("divide", "ops.json", "--devices", 1)["cost_seconds"] == 14e-3
    four = answered_json("divide", "ops.json", "--memory", "1KB", "--devices", 4)
    assert four["cost_seconds"] == pytest.approx(6e-3)  # op3 receives two outputs
    assert [one["memory_bytes"] for one in four["sets"]] == [KILOBYTE] * 4
    hosts = answered_json("divide", "ops.json", "--devices", 1, "--hosts", 1)
    assert hosts["cost_seconds"] == pytest.approx(14e-3)  # a host is five times slower
    free = answered_json("divide", "ops.json", "--any-sets")
    assert free["plan_class"] == "sets of operators, contiguous or not"
    assert free["cost_seconds"] == pytest.approx(9e-3)


@pytest.mark.usefixtures("files")
def test_python_answers_as_the_command() -> None:
    found = stagewright.divide(stagewright.load_partition_problem("ops.json"), memory_bytes=2e3)
    asked = answered_json("divide", "ops.json", "--memory", "2KB")
    assert found.cost_seconds == asked["cost_seconds"]
    assert [list(one.nodes) for one in found.sets or ()] == [one["nodes"] for one in asked["sets"]]
    layers = stagewright.load_partition_problem("layers.json")
    with pytest.raises(InputError, match="hosts is for workloads of operators"):
        stagewright.divide(layers, hosts=1)


@pytest.mark.usefixtures("files")
def test_replicas_of_sets_exchange_their_bytes() -> None:
    """Both devices do 14 ms by turns, and exchange 4 kB; with a slow exchange they do not."""
    asked = ("divide", "ops.json", "--replicas", 2, "--bandwidth")
    found = answered_json(*asked, "4MB/s")
    assert found["cost_seconds"] == pytest.approx(14e-3 / 2 + 4 / 4e3)
    assert found["plan_class"] == "contiguous sets of operators with up to 2 replicas"
    assert [one["replicas"] for one in found["sets"]] == [2]
    assert "2 x accelerator" in answered(*asked, "4MB/s")
    assert answered_json(*asked, "1MB/s")["cost_seconds"] == pytest.approx(9e-3)


@pytest.mark.usefixtures("files")
def test_the_passes_apart_take_no_less() -> None:
    """Backward operators of 8, 1 ms, with the forward ones of 1 and 8 ms: 8 + 8 apart."""
    back = {"isBackwardNode": 1}
    nodes = [
        node(0, 1, 1, colorClass=0), node(1, 8, 1, colorClass=1),
        node(2, 1, 1, colorClass=1, **back), node(3, 8, 1, colorClass=0, **back),
    ]  # fmt: skip
    edges = [edge(0, 1, 0), edge(1, 2, 0), edge(2, 3, 0)]
    Path("both.json").write_text(json.dumps(OPERATORS | {"nodes": nodes, "edges": edges}))
    assert answered_json("divide", "both.json")["cost_seconds"] == pytest.approx(9e-3)
    apart = answered_json("divide", "both.json", "--objective", "phases")
    assert apart["cost_seconds"] == pytest.approx(16e-3)
    assert (apart["status"], apart["bound_seconds"]) == ("optimal", apart["cost_seconds"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["ops.json", "--memory", "900B"], "op0 and what must be with it have 1 kB"),
        (["ops.json", "--memory", "1KB"], "4 devices of 1 kB are needed at least, not 2"),
        (["layers.json", "--memory", "60B"], "layer layer0 needs 70 B on up to 2 devices"),
    ],
)
@pytest.mark.usefixtures("files")
def test_why_there_is_no_division(arguments: list[str], reason: str) -> None:
    found = answered_json("divide", *arguments, code=1)
    assert (found["status"], found["sets"]) == ("infeasible", None)
    assert reason in found["reason"]
    assert reason in answered("divide", *arguments, code=1)


@pytest.mark.usefixtures("files")
def test_a_class_of_any_sets_takes_nothing_else_with_it() -> None:
    """In order, 1 is between 0 and 2 and with them; else 0 and 2 are alone, within their memory."""
    nodes = [node(i, 2.0, KILOBYTE, colorClass=c) for i, c in enumerate((0, None, 0))]
    file = OPERATORS | {"nodes": nodes, "edges": [edge(0, 1, 0), edge(1, 2, 0)]}
    file["maxSizePerFPGA"] = 2 * KILOBYTE
    Path("classes.json").write_text(json.dumps(file))
    assert answered_json("divide", "classes.json", code=1)["status"] == "infeasible"
    found = answered_json("divide", "classes.json", "--any-sets")
    assert (found["status"], found["cost_seconds"]) == ("optimal", pytest.approx(4e-3))
    assert sorted(one["nodes"] for one in found["sets"]) == [["op0", "op2"], ["op1"]]


@pytest.mark.usefixtures("files")
def test_nodes_of_one_name_have_their_numbers() -> None:
    """Sizes of nodes and edges may be left out."""
    nodes = [{"id": i, "name": "mm", "fpgaLatency": 1.0} for i in range(2)]
    file = {"nodes": nodes, "edges": [{"sourceId": 0, "destId": 1}], "maxFPGAs": 2}
    Path("twins.json").write_text(json.dumps(file | {"maxSizePerFPGA": 1.0}))
    assert [one["nodes"] for one in answered_json("divide", "twins.json")["sets"]] == [
        ["mm (0)"], ["mm (1)"],
    ]  # fmt: skip


@pytest.mark.usefixtures("files")
def test_layers_become_stages_with_replicas_and_recomputation() -> None:
    """One stage of two replicas exchanges gradients; two stages send a tensor twice."""
    found = answered_json("divide", "layers.json")
    one = 3.0 + 4 * 0.5 * 200 / (4 * 1e9)
    two = 3.0 + 2 * 10 / 1e9
    assert found["cost_seconds"] == pytest.approx(min(one, two), rel=1e-12)
    tight = answered_json("divide", "layers.json", "--memory", "320B", "--devices", 1)
    (stage,) = tight["sets"]
    assert tight["cost_seconds"] == 3.0 + 4.0  # one of the two layers recomputes
    assert sorted(stage["options"]) == ["activation recomp", "vanilla"]
    assert stage["memory_bytes"] == 200.0 + 20.0 + 2 * 50.0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["ops.json", "--samples", 4], "samples is for Piper's workloads"),
        (["ops.json", "--replicas", 2], "replicas exchange gradients: give the bandwidth"),
        (["ops.json", "--replicas", 0, "--bandwidth", "1GB/s"], "replicas must be"),
        (["ops.json", "--bandwidth", "1GB/s"], "a bandwidth is for replicas, or for Piper's"),
        (["ops.json", "--any-sets", "--objective", "phases"], "any_sets goes with one replica"),
        (["ops.json", "--objective", "most"], "'most' is not one of 'load', 'phases', 'latency'"),
        (["layers.json", "--objective", "phases"], "objective is for workloads of operators"),
        (["layers.json", "--hosts", 0], "hosts is for workloads of operators"),
        (["layers.json", "--any-sets"], "any_sets is for workloads of operators"),
        (["ops.json", "--devices", 0], "--devices must be at least 1, got 0"),
        (["ops.json", "--hosts", -1], "--hosts must not be negative, got -1"),
        (["ops.json", "--memory", "0"], "--memory must be positive and finite, got 0"),
        (["layers.json", "--bandwidth", "0B/s"], "bandwidth '0B/s' must be positive"),
        (["none.json"], "none.json"),
    ],
)
@pytest.mark.usefixtures("files")
def test_what_is_refused(arguments: list[object], complaint: str) -> None:
    assert complaint in refused("divide", *arguments)


@pytest.mark.usefixtures("files")
def test_other_files_are_refused() -> None:
    Path("text.json").write_text("{")
    assert "text.json: no JSON" in refused("divide", "text.json")
    Path("other.json").write_text("[]")
    assert "neither a workload of dnn-partitioning" in refused("divide", "other.json")


@pytest.mark.usefixtures("files")
def test_layers_become_a_model_by_the_time_of_recomputation() -> None:
    answered("import", "--from", "piper", "layers.json", "-o", "model.json")
    chain = load_model("model.json")
    assert [one.name for one in chain.layers] == ["layer0", "layer1"]
    for one in chain.layers:
        (cost,) = one.costs
        assert (cost.forward_seconds, cost.backward_seconds) == (1.0, 2.0)
    broken = json.loads(json.dumps(LAYERS))
    broken["nodes"][1]["TMPCs"]["1"].pop()
    Path("broken.json").write_text(json.dumps(broken))
    line = refused("import", "--from", "piper", "broken.json", "-o", "m.json")
    assert "node 1: TMPCs[1] must have 'vanilla' and 'activation recomp'" in line
