"""Pipelines of operators: stages are contiguous, and everything of a part is on its device."""

from dataclasses import replace

import networkx as nx
import pytest
from fastt import MODELS
from profiles import slow_after
from torch import Tensor
from torch.utils._pytree import tree_map_only

from stagewright.executor.capture.steps.analytic import with_analytic_seconds
from stagewright.executor.capture.steps.step import capture_step
from stagewright.formulations.operators.check import check
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.operators.step_graph import Node, Output, StepGraph, data_parallel
from stagewright.solvers.operators.planning import plan_operators

MICROBATCHES = 4
LAUNCH = 5e-6  # seconds


def microbatches_of(name: str) -> StepGraph:
    make, batch = MODELS[name]
    first = tree_map_only(Tensor, lambda one: one[:2], batch)
    graph = with_analytic_seconds(capture_step(make(), first, name=name), ["v100"])
    nodes = (
        replace(node, seconds={kind: taken + LAUNCH for kind, taken in node.seconds.items()})
        if node.role in ("forward", "backward", "update")
        else node
        for node in graph.nodes
    )
    return data_parallel(replace(graph, nodes=tuple(nodes)), MICROBATCHES, "accumulated")


@pytest.mark.real
@pytest.mark.parametrize("devices", slow_after(1, [3, 2]))
@pytest.mark.parametrize("name", slow_after(2, ["lenet", "bert", "resnet", "rnnlm"]))
def test_stages_of_models(name: str, devices: int) -> None:
    graph = microbatches_of(name)
    cluster = uniform_servers(1, devices, Link(2.5e10, 1e-6), kind="v100")
    plan = plan_operators(graph, cluster, "dag").plan
    assert plan is not None
    assert check(graph, cluster, plan) == ()
    home = {one.operator: one.device for one in plan.operators}
    assert len(set(home.values())) == devices
    copies = [(node.name.rpartition("@")[0], home[node.name]) for node in graph.nodes
              if node.name.rpartition("@")[2].isdigit()]  # fmt: skip
    assert len(set(copies)) == len({base for base, _ in copies})
    # Forward edges between devices lead one way, and backward edges the other way.
    weights = {node.name for node in graph.nodes if node.role == "state"}
    for node in graph.nodes:  # and their views
        if node.beside in weights:
            weights.add(node.name)
    order = nx.DiGraph()
    for node in graph.nodes:
        for name_, _ in node.inputs:
            roles = graph.nodes[graph.index[name_]].role, node.role
            pair = home[name_], home[node.name]
            if name_ in weights or pair[0] == pair[1] or roles[0] != roles[1]:
                continue
            if roles[0] == "forward":
                order.add_edge(*pair)
            elif roles[0] == "backward":
                order.add_edge(*pair[::-1])
    assert nx.is_directed_acyclic_graph(order)
    # It is a pipeline: faster than one device, and no faster than the proof.
    single = plan_operators(graph, cluster, "single").plan
    assert single is not None
    assert plan.certificate is not None
    assert plan.certificate.bound_seconds <= plan.certificate.cost_seconds
    assert plan.certificate.cost_seconds < 0.7 * single.certificate.cost_seconds


def chain(layers: int, microbatches: int, weight: float = 1e6, saved: float = 1e6) -> StepGraph:
    """Equal layers whose backward takes as long as their forward; no updates."""
    nodes = [Node("x", "placeholder", "input", outputs=(Output(4.0),))]
    for i in range(layers):
        before = f"f{i - 1}" if i else "x"
        nodes.append(Node(f"w{i}", "", "state", (), (Output(weight),), {}, weight))
        inputs = ((before, 0), (f"w{i}", 0))
        nodes.append(Node(f"f{i}", "mm", "forward", inputs, (Output(saved),), {"a": 1e-3}))
    gradient = f"f{layers - 1}"
    for i in range(layers)[::-1]:
        inputs = ((gradient, 0), (f"f{i}", 0), (f"w{i}", 0))
        gradient = f"b{i}"
        nodes.append(Node(gradient, "mm", "backward", inputs, (Output(4.0),), {"a": 1e-3}))
    return data_parallel(StepGraph("chain", "test", 1, tuple(nodes)), microbatches, "accumulated")


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (2, 8), (4, 4), (4, 16)])
def test_equal_layers_take_the_time_of_1f1b(stages: int, microbatches: int) -> None:
    graph = chain(stages * 2, microbatches)
    cluster = uniform_servers(1, stages, Link(1e15), kind="a")
    plan = plan_operators(graph, cluster, "dag").plan
    assert plan is not None
    # (m + p - 1) forwards and backwards of two layers
    expected = (microbatches + stages - 1) * 4e-3
    assert plan.certificate.cost_seconds == pytest.approx(expected, rel=1e-6)


def test_stages_fit_in_memory() -> None:
    graph = chain(4, 4, weight=10e6, saved=1e6)
    roomy = plan_operators(graph, uniform_servers(1, 4, Link(1e12), kind="a"), "dag").plan
    assert roomy is not None
    assert len({one.device for one in roomy.operators}) == 4
    least = max(roomy.peak_memory_bytes.values())
    tight = uniform_servers(1, 4, Link(1e12), memory_bytes=least, kind="a")
    found = plan_operators(graph, tight, "dag").plan
    assert found is not None
    assert check(graph, tight, found) == ()
    small = uniform_servers(1, 4, Link(1e12), memory_bytes=9e6, kind="a")
    nothing = plan_operators(graph, small, "dag")
    assert nothing.plan is None
    assert nothing.reason == "the state is 40 MB, all devices together have 36 MB"


@pytest.mark.parametrize("bandwidth", [1e6, 1e8, 1e12])
def test_more_devices_are_never_slower_than_one(bandwidth: float) -> None:
    """Over a slow link a pipeline of two stages is slower than one device."""
    graph = chain(4, 3)
    one, two = (
        plan_operators(graph, uniform_servers(1, n, Link(bandwidth, 1e-2), kind="a"), "dag").plan
        for n in (1, 2)
    )
    assert one is not None
    assert two is not None
    assert two.certificate.cost_seconds <= one.certificate.cost_seconds * (1 + 1e-9)
