"""``stagewright capture``: a step's graph from the command line."""

from pathlib import Path

import pytest
from commands import answered, answered_json, refused

from stagewright.graphs.models.operators.step_graph import data_parallel, load_graph

pytestmark = pytest.mark.real

LENET = (
    "capture",
    "--module",
    "examples.fastt.vision:lenet",
    "--data",
    "examples.fastt.vision:digits",
)


def test_capture_computes_times_for_devices(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    options = ("--mini-batch", 6, "--device", "v100,P100", "-o", file)
    assert answered_json(*LENET, *options) == {"name": "lenet", "operators": 162, "file": str(file)}
    graph = load_graph(file)
    assert graph.samples == 6
    assert graph.source.startswith("analytic: v100")
    for node in graph.nodes:
        assert node.seconds.keys() == {"v100", "p100"}
        assert node.seconds["v100"] <= node.seconds["p100"]


def test_capture_of_replicas(tmp_path: Path) -> None:
    one = tmp_path / "one.json"
    options = (*LENET, "--mini-batch", 4, "--device", "v100")
    answered(*options, "-o", one)
    options = (*LENET, "--mini-batch", 8, "--device", "v100")
    for weights, extra in (("shared", 0), ("mirrored", 1)):
        file = tmp_path / f"{weights}.json"
        answered(*options, "--replicas", 2, "--weights", weights, "-o", file)
        graph, whole = load_graph(file), load_graph(one)
        assert graph == data_parallel(whole, 2, weights)
        states = [node for node in graph.nodes if node.role == "state"]
        assert len(states) == sum(node.role == "state" for node in whole.nodes) * (1 + extra)


def test_capture_of_microbatches(tmp_path: Path) -> None:
    one, file = tmp_path / "one.json", tmp_path / "four.json"
    answered(*LENET, "--mini-batch", 2, "--device", "v100", "-o", one)
    answered(*LENET, "--mini-batch", 8, "--device", "v100", "--microbatches", 4, "-o", file)
    graph = load_graph(file)
    assert graph == data_parallel(load_graph(one), 4, "accumulated")
    assert sum(node.operator == "accumulate" for node in graph.nodes) == 3 * 8
    assert sum(node.operator == "scale" for node in graph.nodes) == 8


def test_capture_measures_on_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    line = answered(
        *LENET, "--measure", "--repetitions", 1, "--optimizer", "sgd:lr=0.1", "-o", file
    )
    assert line == f"{file}: lenet, 65 operators\n"
    graph = load_graph(file)
    assert graph.samples == 2
    assert all(node.seconds["cpu"] > 0 for node in graph.nodes if node.role == "backward")


def test_the_document_is_printed_without_an_output() -> None:
    assert '"format": "stagewright-graph"' in answered(*LENET, "--device", "v100")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give --device, for computed times, or --measure"),
        (("--device", "v100", "--measure"), "give --device, for computed times, or"),
        (("--device", "abacus"), "device 'abacus' is not known"),
        (("--device", "v100", "--mini-batch", 0), "'--mini-batch'"),
        (("--device", "v100", "--replicas", 2, "--microbatches", 2), "--replicas or --micro"),
        (("--device", "v100", "--microbatches", 3), "has 2 samples, which 3 replicas"),
        (("--device", "v100", "--weights", "shared"), "--weights goes with --replicas"),
        (("--device", "v100", "--optimizer", "rprop"), "Rprop is not captured; there are"),
        (("--device", "v100", "--loss", "math:sqrt"), "--loss: 'math:sqrt' raised TypeError"),
    ],
)
def test_capture_refuses_in_one_line(options: tuple[object, ...], message: str) -> None:
    assert message in refused(*LENET, *options)


def test_capture_names_what_does_not_fit_together() -> None:
    wrong = (
        "capture",
        "--module",
        "examples.fastt.vision:vgg19",
        "--data",
        "examples.fastt.vision:digits",
    )
    line = refused(*wrong, "--device", "v100")
    assert line.startswith("examples/fastt/vision.py:")
    assert "to have 3 channels, but got 1 channels" in line
    missing = (
        "capture",
        "--module",
        "examples.fastt.vision:lenet5",
        "--data",
        "examples.fastt.vision:digits",
    )
    assert "has no 'lenet5'" in refused(*missing, "--device", "v100")
