"""The document of a training step's operators."""

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
    load_graph,
    save_graph,
)

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
