"""Piper's files: what is read, and what is refused."""

import json

import pytest

from stagewright.formulations.dags.piper import Edge, LayerOption, piper_problem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.piper import read_piper


def document():
    def way(name, fw, bw):
        return {"id": name, "timePerSample": 2.0, "parameterSize": 3.0, "memoryUsageA": 4.0,
                "memoryUsageB": 5.0, "syncTimeFw": fw, "syncTimeBw": bw}  # fmt: skip

    return {
        "maxDevices": 2, "maxMemoryPerDevice": 9.0, "bandwidth": 8.0, "mbsInBatch": 6,
        "nodes": [
            {"id": 7, "name": "x", "TMPCs": {"1": [way("vanilla", {}, {"5": 1.0})]}},
            {"id": 5, "name": "x", "TMPCs": {"2": [way("vanilla", {"7": 2.0}, {})]}},
        ],
        "edges": [{"sourceId": 7, "destId": 5, "communicationCost": 10.0}],
    }  # fmt: skip


def read(tmp_path, content):
    file = tmp_path / "workload.json"
    file.write_text(json.dumps(content))
    return read_piper(file)


def test_a_workload_becomes_a_problem(tmp_path):
    problem = piper_problem(read(tmp_path, document()), devices=3)
    assert [layer.name for layer in problem.layers] == ["x#7", "x#5"]
    assert problem.edges == (Edge(0, 1, 10.0),)
    assert (problem.devices, problem.memory, problem.bandwidth, problem.samples) == (3, 9, 8, 6)
    assert problem.layers[0].options[1] == (LayerOption("vanilla", 2, 3, 4, 5, {0: 1.0}),)
    assert problem.layers[1].options[2] == (LayerOption("vanilla", 2, 3, 4, 5, {0: 2.0}),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("bandwidth"), "bandwidth"),
        (lambda d: d["nodes"][1].update(id=7), "two nodes have the same id"),
        (lambda d: d["edges"][0].update(destId=4), r"edges\[0\] names node 4"),
        (lambda d: d["edges"].append(d["edges"][0]), r"edges\[0\] appears twice"),
        (lambda d: d["nodes"][0]["TMPCs"]["1"][0]["syncTimeBw"].clear(), r"node 7, TMPCs\[1\]"),
        (lambda d: d["nodes"][0]["TMPCs"]["1"][0].update(timePerSample=-1), "timePerSample"),
    ],
)
def test_what_makes_no_workload_is_refused(tmp_path, change, message):
    content = document()
    change(content)
    with pytest.raises(InputError, match=message):
        read(tmp_path, content)
