"""``plan``, ``check`` and ``show`` with graphs of operators."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import answered, answered_json, refused

import stagewright
from stagewright.formulations.operators.check import check
from stagewright.formulations.operators.plan import load_operator_plan, save_operator_plan
from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.machines.cluster import Link, save_cluster, uniform_servers
from stagewright.graphs.models.chain import save_model
from stagewright.graphs.models.operators.cost_book import CostBook
from stagewright.graphs.models.operators.step_graph import Node, Output, StepGraph, save_graph
from stagewright.solvers.operators.names import PLANNERS

SENT = Output(1e6)
GRAPH = StepGraph(
    "fork",
    "test",
    8,
    (
        Node("x", "placeholder", "input", outputs=(SENT,)),
        Node(
            "a", "mm", "forward", (("x", 0),), (SENT,), {"v100": 4e-3}, line="model.py:7 in layer"
        ),
        Node("b", "mm", "forward", (("x", 0),), (SENT,), {"v100": 4e-3}),
        Node("c", "add", "backward", (("a", 0), ("b", 0)), (), {"v100": 1e-3}),
    ),
)
CLUSTER = uniform_servers(1, 2, Link(1e9), kind="v100", memory_bytes=1e10)
FILES = ("--model", "graph.json", "--cluster", "cluster.json")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_graph(GRAPH, "graph.json")
    save_cluster(CLUSTER, "cluster.json")
    return tmp_path


@pytest.fixture
def plan(place):
    answered("plan", *FILES, "-o", "plan.json", "--time-limit", 1)
    return load_operator_plan("plan.json")


def test_a_graph_is_planned_and_checked(place):
    text = answered("plan", "--planner", "fastt", *FILES, "-o", "plan.json", "--time-limit", 1)
    assert "fork on 1x2 · fastt · 4 operators" in text
    assert "fastt: optimal with whole operators after" in text
    assert "plan.json is written" in text
    found = load_operator_plan("plan.json")
    assert found.critical[-1] == "c"
    assert "valid, 6 ms per step" in answered("check", "plan.json", *FILES)


def test_an_operator_without_a_time_on_a_kind_of_device_is_named(place):
    """It would seem to take no time there."""
    b = replace(GRAPH.nodes[2], seconds={"t4": 1e-3})
    save_graph(replace(GRAPH, nodes=(*GRAPH.nodes[:2], b, GRAPH.nodes[3])), "graph.json")
    for planner in ("fastt", "dag", "single"):
        assert refused("plan", *FILES, "--planner", planner) == (
            "operator 'b' of graph 'fork' has no time on 'v100' (it has one on t4); capture it "
            "with --device v100, or let `train` learn it"
        )


def test_json_has_the_certificate_and_the_devices(place):
    found = answered_json("plan", *FILES, "--planner", "search", "--time-limit", 1)
    assert found["status"] == "optimal"
    assert found["cost_seconds"] == pytest.approx(6e-3)
    assert found["bound_seconds"] == pytest.approx(6e-3)
    assert found["any_splits_seconds"] == pytest.approx(4.5e-3)
    assert sum(one["busy_seconds"] for one in found["devices"]) == pytest.approx(9e-3)
    assert sorted(one["operators"] for one in found["devices"]) == [2, 2]


def test_every_planner_has_its_name_in_the_list(place):
    listed = answered_json("planners")["planners"]
    names = {one["name"] for one in listed if one["model"] == "operators"}
    assert names == set(PLANNERS)
    assert "of graphs of operators" in answered("planners")


def test_exclusive_transfers(place):
    found = answered_json("plan", *FILES, "--contention", "exclusive", "--time-limit", 1)
    assert found["contention"] == "exclusive"


def test_what_does_not_fit_is_answered_no_with_its_line(place):
    save_cluster(uniform_servers(1, 2, Link(1e9), kind="v100", memory_bytes=1e6), "small.json")
    text = answered("plan", "--model", "graph.json", "--cluster", "small.json", code=1)
    assert "fastt: infeasible" in text
    assert "model.py:7 in layer: operator 'a' needs 2 MB, the largest device has 1 MB" in text


def test_a_kind_of_device_without_times_is_refused(place):
    save_cluster(uniform_servers(1, 2, Link(1e9), kind="p100", memory_bytes=1e9), "other.json")
    line = refused("plan", "--model", "graph.json", "--cluster", "other.json")
    assert line == "graph 'fork' has no times on 'p100', as s0g0 is; it has them on v100"
    assert "absent.json: No such file" in refused("plan", "--model", "absent.json", *FILES[2:])


def test_a_graph_whose_costs_are_not_learned_yet_is_refused(place):
    graph, _ = CostBook().priced(GRAPH, CLUSTER)
    assert graph.source == "learned; operators not measured: 3 of 3 on v100"
    save_graph(graph, "graph.json")
    line = refused("plan", *FILES)
    assert line.startswith("graph 'fork' has no times: capture it with --measure or")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"critical": ("a", "c")}, "critical"),
        ({"peak_memory_bytes": {"s0g0": 0.0, "s0g1": 0.0}}, "peak_memory_bytes.s0g0"),
        ({"peak_memory_bytes": {}}, "peak_memory_bytes.s0g0"),
        ({"transfers": ()}, "plan"),
    ],
)
def test_changed_plans_are_refuted(plan, change, rule):
    wrong = replace(plan, **change)
    assert check(GRAPH, CLUSTER, plan) == ()
    assert rule in {one.place for one in check(GRAPH, CLUSTER, wrong)}
    save_operator_plan(wrong, "wrong.json")
    assert "broken rule" in answered("check", "wrong.json", *FILES, code=1)


def test_a_role_and_a_device_of_others_are_refuted(plan):
    first = replace(plan.operators[-1], role="forward")
    wrong = replace(plan, operators=(*plan.operators[:-1], first))
    assert [one.message for one in check(GRAPH, CLUSTER, wrong)] == ["is backward, not forward"]
    peaks = {**plan.peak_memory_bytes, "gpu9": 1.0}
    assert "there is no such device" in {
        one.message for one in check(GRAPH, CLUSTER, replace(plan, peak_memory_bytes=peaks))
    }


def test_a_plan_of_another_graph_is_refused(plan):
    save_graph(replace(GRAPH, name="other"), "other.json")
    line = refused("check", "plan.json", "--model", "other.json", "--cluster", "cluster.json")
    assert "made for fork on 1x2" in line


def test_from_python(place):
    found = stagewright.place(GRAPH, CLUSTER, time_limit=1)
    assert found.cost_seconds == pytest.approx(6e-3)
    assert found.plan == load_after(found.plan)
    assert stagewright.check_placement(found.plan, GRAPH, CLUSTER) == ()
    with pytest.raises(stagewright.InputError, match="time_limit must be a positive number"):
        stagewright.place(GRAPH, CLUSTER, time_limit=0)
    with pytest.raises(stagewright.InputError, match="contention"):
        stagewright.place(GRAPH, CLUSTER, contention="some")
    with pytest.raises(stagewright.InputError, match="graph must be"):
        stagewright.place(analytic_model("vgg19"), CLUSTER)


def load_after(plan):
    stagewright.save_operator_plan(plan, "python.json")
    return stagewright.load_operator_plan("python.json")


def test_drawings(plan):
    answered("show", "plan.json", "--html", "p.html", "--png", "p.png", "--trace", "p.trace.json")
    page = Path("p.html").read_text(encoding="utf-8")
    assert "on the critical path" in page
    assert "gap, over plans with any splits" in page
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads(Path("p.trace.json").read_text(encoding="utf-8"))
    spans = {one["name"]: one for one in trace["traceEvents"] if one["ph"] == "X"}
    home = plan.operators[-1].device
    moved = next(one for one in plan.operators if one.device != home and one.role == "forward")
    assert spans[moved.operator]["dur"] == pytest.approx(4000)
    assert spans[f"{moved.operator} to {home}"]["dur"] == pytest.approx(1000)
    assert spans["c"]["args"]["critical"]
    assert "4 operators" in answered("show", "plan.json")
    assert answered_json("show", "plan.json")["operators"] == 4


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--microbatches", 8), "--microbatches is for models of layers; graph.json is a graph"),
        (("--gap", "1%"), "--gap is for models of layers"),
        (("--planner", "spp"), "unknown planner 'spp'"),
        (("--time-limit", 0), "--time-limit must be a positive number"),
    ],
)
def test_options_of_layers_are_refused_for_graphs(place, options, line):
    assert line in refused("plan", *FILES, *options)


def test_options_of_graphs_are_refused_for_layers(place):
    save_model(analytic_model("vgg19"), "layers.json")
    layers = ("--model", "layers.json", "--cluster", "cluster.json")
    said = refused("plan", *layers, "--microbatches", 4, "--planner", "heft")
    assert "planner 'heft' places graphs of operators; layers.json has layers" in said
    said = refused("plan", *layers, "--contention", "none")
    assert said == "--contention is for graphs of operators"
    assert "--microbatches is missing" in refused("plan", *layers)
    answered("plan", *layers, "--microbatches", 2, "--planner", "dp", "-o", "layers.plan.json")
    assert "a 'stagewright-" in refused("check", "layers.plan.json", *FILES)
