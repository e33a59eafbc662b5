"""Piper's pipelines: every pipeline of tiny problems, and the published times per sample."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from stagewright.formulations.dags.piper import (
    Edge,
    Layer,
    LayerOption,
    PiperProblem,
    PiperStage,
    piper_problem,
)
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.importers.piper import read_piper


def option(seconds, flight=0.0, fixed=0.0, parameters=0.0, edges=None):
    return LayerOption("", seconds, parameters, flight, fixed, edges or {})


# Layers a -> b -> c: b in two ways on one device, in one way on two.
PROBLEM = PiperProblem(
    layers=(
        Layer("a", {1: (option(1.0, 1.0, edges={0: 1.0}),)}),
        Layer(
            "b",
            {
                1: (option(4.0, 3.0, 1.0, 6.0), option(6.0, 1.0, 2.0, 6.0)),
                2: (option(3.0, 2.0, 1.0, 3.0, {0: 2.0, 1: 3.0}),),
            },
        ),
        Layer("c", {1: (option(1.0, 1.0),)}),
    ),
    edges=(Edge(0, 1, 2.0), Edge(1, 2, 4.0)),
    devices=4,
    memory=9.0,
    bandwidth=8.0,
    samples=6,
)
GOOD = (
    PiperStage((0,), 1, 1, (0,)),
    PiperStage((1,), 1, 2, (0,)),
    PiperStage((2,), 1, 1, (0,)),
)


def test_the_time_and_the_bytes_of_a_stage_by_hand():
    # b on two replicas: 4 / 2, 2 * (2 + 4) bytes in and out / 2 / 8, and 4 / 2 * 6 / 6 bytes / 8.
    replicated = PiperStage((1,), 2, 1, (0,))
    assert PROBLEM.stage_seconds(replicated) == pytest.approx(2 + 6 / 8 + 2 / 8)
    assert PROBLEM.stage_bytes(replicated, 2) == 7
    # b on two shards: 3, and 2 * (2 + 2 + 4 + 3) bytes / 8; a: 1, and 2 * (2 + 1) bytes / 8.
    assert PROBLEM.stage_seconds(GOOD[1]) == pytest.approx(3 + 22 / 8)
    assert PROBLEM.stage_seconds(GOOD[0]) == pytest.approx(1 + 6 / 8)
    assert PROBLEM.evaluate(GOOD) == pytest.approx(3 + 22 / 8)
    # Within a stage no edge is paid for; one stage of one replica exchanges nothing.
    whole = PiperStage((0, 1, 2), 1, 1, (0, 0, 0))
    assert PROBLEM.evaluate((whole,)) == pytest.approx(6)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (GOOD[:2], "c is in no stage"),
        ((*GOOD, GOOD[0]), "a is in two stages"),
        ((GOOD[1], GOOD[0], GOOD[2]), "the edge from a to b goes back"),
        ((PiperStage((0, 2), 1, 1, (0, 0)), PiperStage((1,), 1, 1, (1,))), "from b to c goes back"),
        ((GOOD[0], PiperStage((1,), 1, 1, (2,)), GOOD[2]), "b has no option 2 for 1 shards"),
        ((PiperStage((0,), 1, 2, (0,)), *GOOD[1:]), "a has no option 0 for 2 shards"),
        ((*GOOD, PiperStage((), 1, 1, ())), "stage 3 must have layers"),
        ((GOOD[0], PiperStage((1, 2), 1, 1, (0,))), "stage 1 must have layers, and an option"),
        ((*GOOD[:2], PiperStage((3,), 1, 1, (0,))), "there is no layer 3"),
        ((*GOOD[:2], PiperStage((2,), 4, 1, (0,))), "stage 2: 4 replicas do not divide 6 samples"),
        ((PiperStage((0,), 0, 1, (0,)), *GOOD[1:]), "stage 0: 0 replicas do not divide"),
        ((*GOOD[:2], PiperStage((2,), 6, 1, (0,))), "8 replicas in all for 6 samples"),
        ((*GOOD[:2], PiperStage((2,), 2, 1, (0,))), "5 devices are used, there are 4"),
        # b has 3 samples in flight on its one replica: 3 * 3 + 1 bytes.
        ((GOOD[0], PiperStage((1,), 1, 1, (0,)), PiperStage((2,), 2, 1, (0,))),
         "stage 1: 10 B with 3 samples in flight on a device of 9 B"),
    ],
)  # fmt: skip
def test_broken_pipelines_are_refused(stages, message):
    with pytest.raises(InvalidPlan, match=message):
        PROBLEM.evaluate(stages)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": 0}, "devices must be at least 1"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"bandwidth": 0.0}, "bandwidth must be positive"),
        ({"memory": -1.0}, "memory must not be negative"),
        ({"layers": ()}, "there must be a layer"),
        ({"edges": (Edge(0, 1, 1.0), Edge(1, 3, 1.0))}, "edge 1 must be between layers below 3"),
        ({"edges": (Edge(0, 1, inf), Edge(1, 2, 1.0))}, "edge 0: bytes must be finite"),
        ({"edges": (*PROBLEM.edges, Edge(2, 0, 1.0))}, "the layers form a cycle: a -> b -> c"),
        ({"edges": PROBLEM.edges[:1]}, r"edge_bytes must be of the edges \[0\], got \[0, 1\]"),
        ({"layers": (Layer("a", {0: (option(1.0),)}), *PROBLEM.layers[1:])}, "number of shards"),
        ({"layers": (Layer("a", {1: (option(-1.0),)}), *PROBLEM.layers[1:])}, "layer a, option"),
    ],
)
def test_what_makes_no_problem_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        replace(PROBLEM, **change)


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


PIPER = Path(__file__).parents[3] / "shared" / "data" / "piper"
