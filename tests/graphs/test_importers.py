import json
from pathlib import Path

import numpy as np
import pytest

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.dnn_partitioning import (
    dnn_partitioning_graph,
    read_dnn_partitioning,
)
from stagewright.graphs.importers.pipedream import pipedream_graph, read_pipedream
from stagewright.graphs.models.chain import load_model, save_model

DATA = Path(__file__).parents[3] / "shared" / "data"
PIPEDREAM, DOWNSETS = DATA / "pipedream", DATA / "downsets"
needs_data = pytest.mark.skipif(
    not PIPEDREAM.is_dir(), reason="the public profiles are not beside the checkout"
)


def node(id_: str, description: str, forward, backward, activation, parameter=0.0) -> str:
    return (
        f"{id_} -- {description} -- forward_compute_time={forward}, "
        f"backward_compute_time={backward}, activation_size={activation}, "
        f"parameter_size={parameter}\n"
    )


SMALL = (
    node("node1", "Input", 600.0, 0.0, 4096.0)
    + node("node3", "ReLU(inplace)", 1.0, 2.0, 8000.0)
    + node("node2", "Conv2d(3, 8, kernel_size=(3, 3))", 3.0, 5.0, 8000.0, 2500.0)
    + node("node4", "LSTM(8, 4)", 4.0, 7.0, "[500.0; 40.0; 40.0]", 900.0)
    + "\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node4"
)


def write(tmp_path: Path, text: str, name: str = "small.graph.txt") -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


def totals(chain) -> tuple[float, float]:
    costs = [layer.costs[0] for layer in chain.layers]
    return (
        sum(cost.forward_seconds for cost in costs),
        sum(cost.total_backward_seconds for cost in costs),
    )


def test_pipedream_units_inputs_views_and_lists(tmp_path: Path):
    chain = read_pipedream(write(tmp_path, SMALL))
    assert chain.name == "small"
    assert chain.source.startswith("measured: PipeDream profile small.graph.txt")
    assert "not given in the file" in chain.source
    assert [layer.name for layer in chain.layers] == ["node2 Conv2d", "node3 ReLU", "node4 LSTM"]
    costs = [layer.costs[0] for layer in chain.layers]
    assert [cost.forward_seconds for cost in costs] == [0.003, 0.001, 0.004]
    assert [cost.backward_seconds for cost in costs] == [0.005, 0.002, 0.007]
    assert [cost.output_bytes for cost in costs] == [8000, 8000, 580]
    assert [cost.saved_bytes for cost in costs] == [8000, 0, 580]
    assert chain.parameter_bytes.tolist() == [2500, 0, 900]
    assert {cost.device_kind for cost in costs} == {None}
    assert chain.microbatch_size == 1
    assert chain.optimizer_bytes_per_parameter_byte == 1


def test_pipedream_options(tmp_path: Path):
    chain = read_pipedream(
        write(tmp_path, SMALL), microbatch_size=64, device_kind="v100", name="lstm"
    )
    assert (chain.name, chain.microbatch_size) == ("lstm", 64)
    assert chain.layers[0].costs[0].device_kind == "v100"
    assert chain.layers[0].costs[0].microbatch_size == 64
    assert "one microbatch of 64" in chain.source


def test_an_imported_chain_survives_its_file(tmp_path: Path):
    chain = read_pipedream(write(tmp_path, SMALL))
    save_model(chain, tmp_path / "model.json")
    assert load_model(tmp_path / "model.json") == chain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no nodes"),
        (node("node1", "Input", 1, 0, 8), "no nodes but inputs"),
        (SMALL.replace("=4.0, back", "=-4.0, back"), ":4: forward_compute_time .* not negative"),
        (SMALL.replace("=7.0", "=nan"), ":4: backward_compute_time must be finite"),
        (SMALL.replace("=900.0", "=many"), ":4: parameter_size: 'many' is not a number"),
        (SMALL.replace("40.0]", "x]"), ":4: activation_size: ' x' is not a number"),
        (SMALL.replace("[500.0; 40.0; 40.0]", ""), ":4: activation_size: '' is not a number"),
        (SMALL.replace("node3 -- ReLU", "node4 -- ReLU"), ":4: duplicate node 'node4'"),
        (SMALL.replace("node3 -- ReLU", "node3 ReLU"), ":2: neither a node nor an indented edge"),
        (SMALL.replace("\tnode2 -- node3", "\tnode2 -> node3"), ":6: an edge is"),
        (SMALL.replace("\tnode2 -- node3", "\tnode2 -- node9"), ":6: the edge names 'node9'"),
        (SMALL + "\n\tnode4 -- node2", ":8: the edge closes a cycle: .*node"),
        (SMALL + "\n\tnode4 -- node4", ":8: the edge closes a cycle: node4 -> node4"),
        (SMALL[: SMALL.index("\tnode3")], ":4: no edges connect node 'node4' .*truncated"),
        (SMALL[: SMALL.index("\tnode1")], ":2: no edges connect node 'node3' .*truncated"),
        (SMALL[:-1], ":7: the edge names 'node'"),
        (SMALL[:-7], ":7: an edge is"),
        (SMALL[: SMALL.index("Conv2d") + 40], ":3: neither a node"),
    ],
)
def test_pipedream_faults_get_one_line(tmp_path: Path, text, message):
    file = write(tmp_path, text)
    with pytest.raises(InputError, match=message) as caught:
        read_pipedream(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_pipedream_of_a_missing_file():
    with pytest.raises(InputError, match="No such file"):
        read_pipedream("absent.graph.txt")


@needs_data
@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("vgg16", 0.6725),
        ("alexnet", 0.0853),
        ("gnmt", 0.0894),
        ("gnmt_large", 0.5205),
        ("resnet50", 0.4434),
    ],
)
def test_pipedream_totals_of_one_microbatch(name: str, seconds: float):
    chain = read_pipedream(PIPEDREAM / f"{name}.graph.txt")
    assert sum(totals(chain)) == pytest.approx(seconds, abs=5e-5)


@needs_data
@pytest.mark.parametrize(
    ("name", "layers", "millions"),
    [
        ("vgg16", 40, 138.36),
        ("resnet50", 176, 25.56),
        ("resnet101", 346, 44.55),
        ("gnmt", 45, 193.77),
    ],
)
def test_pipedream_layers_and_parameters(name: str, layers: int, millions: float):
    chain = read_pipedream(PIPEDREAM / f"{name}.graph.txt")
    assert len(chain) == layers
    assert chain.parameter_bytes.sum() / 4e6 == pytest.approx(millions, abs=0.005)


@needs_data
@pytest.mark.parametrize("file", sorted(PIPEDREAM.glob("*.graph.txt")), ids=lambda file: file.stem)
def test_contraction_keeps_totals_of_real_profiles(file: Path):
    whole, merged = read_pipedream(file), read_pipedream(file, contract=True)
    np.testing.assert_allclose(totals(whole), totals(merged))
    assert len(merged) < len(whole)


@needs_data
def test_contraction_makes_residual_blocks_layers():
    merged = read_pipedream(PIPEDREAM / "resnet50.graph.txt", contract=True)
    blocks = [layer for layer in merged.layers if layer.name.endswith("Add")]
    assert len(blocks) == 16


WORKLOAD = {
    "maxSizePerFPGA": 16e9,
    "maxFPGAs": 4,
    "maxCPUs": 1,
    "nodes": [
        {"id": 1, "name": "a", "fpgaLatency": 2, "size": 150, "isBackwardNode": 0, "colorClass": 1},
        {"id": 2, "name": "b", "fpgaLatency": 4, "size": 40, "isBackwardNode": 0, "colorClass": 2},
        {"id": 3, "name": "ag", "fpgaLatency": 5, "size": 1, "isBackwardNode": 1, "colorClass": 1},
        {"id": 4, "name": "bg", "fpgaLatency": 7, "size": 1, "isBackwardNode": 1, "colorClass": 2},
    ],
    "edges": [
        {"sourceId": 1, "destId": 2, "size": 100, "cost": 0.1},
        {"sourceId": 4, "destId": 3, "size": 100, "cost": 0.1},
    ],
}


def workload(**changes) -> dict:
    """A deep copy of WORKLOAD, with ``nodes`` and ``edges`` changed in the entries given."""
    copy = json.loads(json.dumps(WORKLOAD))
    for table in ("nodes", "edges"):
        for index, fields in changes.pop(table, {}).items():
            copy[table][index].update(fields)
    return copy | changes


def write_workload(tmp_path: Path, document: dict) -> Path:
    return write(tmp_path, json.dumps(document), "tiny_training.json")


def test_dnn_partitioning_merges_forward_and_backward(tmp_path: Path):
    chain = read_dnn_partitioning(write_workload(tmp_path, WORKLOAD))
    assert chain.name == "tiny_training"
    assert "up to 4 devices of 16 GB" in chain.source
    assert [layer.name for layer in chain.layers] == ["a", "b"]
    costs = [layer.costs[0] for layer in chain.layers]
    assert [cost.forward_seconds for cost in costs] == [0.002, 0.004]
    assert [cost.backward_seconds for cost in costs] == [0.005, 0.007]
    assert costs[0].output_bytes == costs[0].saved_bytes == 100
    assert chain.layers[0].parameter_bytes == 50
    assert chain.optimizer_bytes_per_parameter_byte == 2


def test_dnn_partitioning_inference_has_no_backward(tmp_path: Path):
    document = workload()
    del document["nodes"][2:], document["edges"][1:]
    chain = read_dnn_partitioning(write_workload(tmp_path, document))
    costs = [layer.costs[0] for layer in chain.layers]
    assert [cost.backward_seconds for cost in costs] == [0, 0]
    assert [cost.saved_bytes for cost in costs] == [0, 0]


def test_dnn_partitioning_weights_join_their_reader(tmp_path: Path):
    document = workload()
    document["nodes"].append(
        {"id": 9, "name": "w", "fpgaLatency": 0, "size": 64, "isBackwardNode": 0, "colorClass": 2}
    )
    document["edges"].append({"sourceId": 9, "destId": 2, "size": 64, "cost": 0})
    chain = read_dnn_partitioning(write_workload(tmp_path, document))
    assert [layer.name for layer in chain.layers] == ["a", "b"]
    assert chain.parameter_bytes.tolist() == [0, 64]
    assert [layer.costs[0].saved_bytes for layer in chain.layers] == [150, 40]


def test_dnn_partitioning_shares_the_backward_of_a_class(tmp_path: Path):
    document = workload(nodes={1: {"colorClass": 1}, 3: {"colorClass": None}})
    graph = dnn_partitioning_graph(write_workload(tmp_path, document))
    # Both backward nodes, the second through its neighbour, in proportion 2 : 4.
    assert [operator.backward_seconds for operator in graph.operators] == pytest.approx(
        [0.004, 0.008]
    )


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (workload(nodes={0: {"fpgaLatency": -1}}), r"nodes\[0\]\.fpgaLatency: .*greater"),
        (workload(nodes={0: {"fpgaLatency": float("nan")}}), r"nodes\[0\]\.fpgaLatency"),
        (workload(nodes={1: {"size": "big"}}), r"nodes\[1\]\.size: .*got 'big'"),
        (workload(nodes={1: {"id": 1}}), "two nodes have the same id"),
        (workload(nodes={1: {"name": "a"}}), "two operators are named 'a'"),
        (workload(nodes={1: {"supportedOnFpga": 0}}), "'b' does not run on an accelerator"),
        (workload(nodes={2: {"colorClass": 8}, 3: {"colorClass": 9}}), "no backward node shares"),
        (workload(nodes={2: {"colorClass": 8}}, edges={1: {"sourceId": 1}}), "'ag' belongs to no"),
        (workload(edges={0: {"destId": 7}}), r"edges\[0\] names node 7"),
        (workload(edges={1: {"sourceId": 2, "destId": 1}}), "form a cycle: [ab] -> [ab] -> [ab]"),
        ({"nodes": []}, "edges: missing field"),
        (workload(nodes={}) | {"nodes": [], "edges": []}, "has no operators"),
    ],
)
def test_dnn_partitioning_faults_get_one_line(tmp_path: Path, document, message):
    file = write_workload(tmp_path, document)
    with pytest.raises(InputError, match=message) as caught:
        read_dnn_partitioning(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", json.dumps(WORKLOAD)[:200]])
def test_dnn_partitioning_of_broken_files(tmp_path: Path, text):
    file = write(tmp_path, text, "broken.json")
    with pytest.raises(InputError) as caught:
        read_dnn_partitioning(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


@needs_data
@pytest.mark.parametrize("file", sorted(DOWNSETS.glob("*.json")), ids=lambda file: file.stem)
def test_dnn_partitioning_keeps_the_totals_of_real_workloads(file: Path):
    nodes = json.loads(file.read_text())["nodes"]
    chain = read_dnn_partitioning(file)
    for total, backward in zip(totals(chain), (False, True), strict=True):
        latencies = [n["fpgaLatency"] for n in nodes if bool(n["isBackwardNode"]) == backward]
        assert total * 1e3 == pytest.approx(sum(latencies))


@needs_data
@pytest.mark.parametrize(
    ("workload_name", "profile", "loading"),
    [("gnmt", "gnmt_large", 0), ("resnet50", "resnet50", 1)],
)
def test_both_importers_agree_on_the_same_profile(workload_name, profile, loading):
    chain = read_dnn_partitioning(DOWNSETS / f"LayerGraphs_{workload_name}_training.json")
    same = read_pipedream(PIPEDREAM / f"{profile}.graph.txt")
    # The workloads keep the input node, with the time of loading data.
    inputs = [layer for layer in chain.layers if layer.name == "node1"] if loading else []
    extra = sum(layer.costs[0].forward_seconds for layer in inputs)
    assert totals(chain)[0] - extra == pytest.approx(totals(same)[0])
    assert totals(chain)[1] == pytest.approx(totals(same)[1])
    assert chain.parameter_bytes.sum() == pytest.approx(same.parameter_bytes.sum())


@needs_data
def test_pipedream_graphs_keep_their_edges():
    graph = pipedream_graph(PIPEDREAM / "gnmt.graph.txt")
    assert ("node4 Embedding", "node5 EmuBidirLSTM") in graph.edges
    assert not any("Input" in name for edge in graph.edges for name in edge)
