"""The document of a training step's operators, and its data-parallel graph within memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.operators.step_graph import (
    Node,
    Output,
    Split,
    StepGraph,
    data_parallel,
    load_graph,
    save_graph,
)

W = Node("w", "state", "state", outputs=(Output(400.0, (10, 10)),), state_bytes=400.0)
B = Node("b", "state", "state", outputs=(Output(8.0, (2,)),), state_bytes=8.0)
VIEW = Node("t", "aten.t", "forward", (("w", 0),), (Output(400.0, (10, 10), True),), beside="w")
X = Node("x", "input", "input", outputs=(Output(80.0, (2, 10)),))
Y = Node("y", "aten.mm", "forward", (("x", 0), ("t", 0)), (Output(80.0, (2, 10)),), {"v": 2.0})
S = Node("s", "aten.sum", "forward", (("y", 0),), (Output(8.0, (2,)), Output(4.0)), {"v": 1.0})
G = Node("g", "aten.mm", "backward", (("x", 0), ("y", 0)), (Output(400.0, (10, 10)),), {"v": 2.0})
H = Node("h", "aten.t", "backward", (("g", 0),), (Output(400.0, (10, 10), True),), beside="g")
U = Node(
    "u",
    "aten.add_",
    "update",
    (("w", 0), ("h", 0)),
    (Output(400.0, (10, 10), True),),
    {"v": 3.0},
    beside="w",
    after=("t", "y"),
)
C = Node("c", "aten.copy_", "update", (("b", 0), ("s", 0)), (Output(8.0, (2,), True),), beside="b")
SHARE = StepGraph("small", "test", 2, (W, B, VIEW, X, Y, S, G, H, U, C))


def named(graph: StepGraph) -> dict[str, Node]:
    return {node.name: node for node in graph.nodes}


def test_shared_weights_are_read_by_all_and_updated_once() -> None:
    graph = data_parallel(SHARE, 3)
    node = named(graph)
    assert graph.samples == 6
    assert set(node) == {
        *("w", "b", "t", "u", "c", "h.0@mean"),
        *(f"{name}@{i}" for name in "xysgh" for i in range(3)),
    }
    assert node["y@2"].inputs == (("x@2", 0), ("t", 0))
    assert node["h.0@mean"].inputs == (("h@0", 0), ("h@1", 0), ("h@2", 0))
    assert node["h.0@mean"].outputs == (Output(400.0, (10, 10)),)
    assert node["h.0@mean"].seconds == {"v": 4.0}  # four tensors; the update moves three in 3 s
    assert node["u"].inputs == (("w", 0), ("h.0@mean", 0))
    assert node["u"].after == ("t", "y@0", "y@1", "y@2")
    assert node["h@1"].beside == "g@1"
    assert node["c"].inputs == (("b", 0), ("s@0", 0))


def test_mirrored_weights_are_updated_by_every_replica() -> None:
    node = named(data_parallel(SHARE, 2, "mirrored"))
    assert len(node) == 2 * len(SHARE) + 1
    assert node["h.0@mean"].operator == "all_reduce"
    assert len(node["h.0@mean"].outputs) == 2
    assert node["h.0@mean"].seconds == {"v": 4.0}
    assert node["u@1"].inputs == (("w@1", 0), ("h.0@mean", 1))
    assert node["u@1"].after == ("t@1", "y@1")
    assert node["c@1"].inputs == (("b@1", 0), ("s@1", 0))
    assert sum(one.state_bytes for one in node.values()) == 2 * 408


@pytest.mark.parametrize("weights", ["shared", "mirrored"])
def test_one_replica_is_the_graph_itself(weights: Any) -> None:
    assert data_parallel(SHARE, 1, weights) is SHARE
    with pytest.raises(InputError, match="replicas must be at least 1, got 0"):
        data_parallel(SHARE, 0, weights)


WEIGHT = Node("w", "parameter", "state", outputs=(Output(400.0, (10, 10)),), state_bytes=1200.0)
DATA = Node("x", "placeholder", "input", outputs=(Output(320.0, (8, 10)),))
PRODUCT = Node(
    "y",
    "aten.mm",
    "forward",
    (("x", 0), ("w", 0)),
    (Output(320.0, (8, 10)),),
    {"v100": 1e-5},
    splits=(Split("batch", 8, (0, None), (0,)), Split("channel", 10, (None, 1), (1,))),
    line="model.py:3",
)
STEP = Node("u", "aten.add_", "update", (("w", 0), ("y", 0)), (), {}, beside="w")
GRAPH = StepGraph("small", "test", 8, (WEIGHT, DATA, PRODUCT, STEP))


def test_a_graph_reads_back_as_written(tmp_path: Path) -> None:
    save_graph(GRAPH, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json") == GRAPH
    assert load_graph(tmp_path / "graph.json").digest() == GRAPH.digest()
    assert replace(GRAPH, samples=4).digest() != GRAPH.digest()
    assert GRAPH.index["y"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n: n.pop(0), "'y' reads 'w', which is missing"),
        (lambda n: n.insert(0, n.pop(2)), "'y' reads 'x', which comes later: operators are in"),
        (lambda n: n[2].update(inputs=[["x", 1], ["w", 0]]), "output 1 of 'x', which has 1"),
        (lambda n: n[2].update(inputs=[["x", -1], ["w", 0]]), "output -1 of 'x', which has 1"),
        (lambda n: n[1].update(name="w"), "which is missing|two operators are named 'w'"),
        (lambda n: n[3].update(beside="z"), "'u' is beside 'z', which is not before it"),
        (lambda n: n[3].update(after=["u"]), "'u' is after 'u', which is not before it"),
        (lambda n: n[2].update(seconds={"v100": -1.0}), "'y': seconds on 'v100' must be"),
        (lambda n: n[2]["splits"][0].update(inputs=[0]), "names 1 inputs and 1 outputs, it has 2"),
        (lambda n: n[2]["splits"][0].update(size=1), "size of 2 or more: 1"),
        (lambda n: n.clear(), "operators"),
    ],
)
def test_a_broken_graph_is_named_in_one_line(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    save_graph(GRAPH, path)
    data = json.loads(path.read_text())
    change(data["nodes"])
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=message) as caught:
        load_graph(path)
    assert "\n" not in str(caught.value)
