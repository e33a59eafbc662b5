"""Times of captured operators, and the data-parallel graph carried out."""

from typing import Any

import pytest
import torch
from fastt import MODELS
from models import ResidualMLP, vectors
from step_loop import plain_loop
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

from stagewright.executor.capture.steps.analytic import operation, with_analytic_seconds
from stagewright.executor.capture.steps.document import operators
from stagewright.executor.capture.steps.joint import identifier
from stagewright.executor.capture.steps.parts import run_part
from stagewright.executor.capture.steps.step import CapturedStep, capture_step
from stagewright.executor.measuring.machine import Machine
from stagewright.executor.measuring.operators import measure_operators
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.data_parallel import data_parallel
from stagewright.graphs.models.step_graph import StepGraph

DESCENT = torch.optim.SGD


def works(step: CapturedStep) -> dict[str, Any]:
    return {node.name: operation(node, 4) for node in operators(step.module.graph)}


@pytest.mark.parametrize("name", ["vgg", "bert"])
def test_flops_are_those_that_torch_counts_in_the_loop(name: str) -> None:
    build, batch = MODELS[name]
    model = build()
    step = capture_step(model, batch, optimizer=DESCENT)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert sum(one.flops for one in works(step).values()) == counter.get_total_flops()


def test_seconds_of_known_operators() -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU())
    batch = torch.randn(16, 64), torch.randint(32, (16,))
    step = capture_step(model, batch, optimizer=DESCENT)
    found = {node.name: node for node in with_analytic_seconds(step, ["V100", "k80"]).nodes}
    moved = 4 * (16 * 64 + 64 * 32 + 16 * 32)
    assert works(step)["mm"].flops == 2 * 16 * 64 * 32
    bounds = 2 * 16 * 64 * 32 / (15.7e12 * 0.5), moved / (900e9 * 0.75)
    assert found["mm"].seconds["v100"] == pytest.approx(max(bounds))
    assert found["relu"].seconds["k80"] == pytest.approx(4 * 2 * 16 * 32 / (240e9 * 0.75))
    free = [one.name for one in found.values() if one.seconds["v100"] == 0]
    assert free == [
        one.name
        for one in found.values()
        if one.role in ("state", "input") or one.operator in ("aten.t", "aten.view")
    ]
    with pytest.raises(InputError, match="device 'abacus' is not known"):
        with_analytic_seconds(step, ["abacus"])


def test_a_look_up_reads_rows_and_not_the_table() -> None:
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Flatten())
    batch = torch.randint(1000, (4, 2)), torch.randint(16, (4,))
    found = works(capture_step(model, batch, optimizer=DESCENT))
    assert found["embedding"].moved * 4 == 2 * 4 * 2 * 8 * 4 + 4 * 2 * 8


def test_measured_seconds_leave_the_states_as_they_are() -> None:
    step = capture_step(ResidualMLP(), vectors(8))
    before = {name: one.clone() for name, one in step.states.items()}
    graph = measure_operators(step, vectors(8), Machine(torch.device("cpu"), 1, "cpu"), rounds=2)
    assert all(torch.equal(step.states[name], one) for name, one in before.items())
    assert graph.source.startswith("measured: ")
    for node in graph.nodes:
        assert (node.seconds["cpu"] > 0) == (node.role not in ("state", "input")), node.name


# The data-parallel graph


def carried_out(
    graph: StepGraph, step: CapturedStep, batch: Any, states: dict[str, Tensor]
) -> None:
    """Run the operators of ``graph``, whose replicas have consecutive parts of the batch."""
    node: dict[str, fx.Node] = {one.name: one for one in operators(step.module.graph)}
    share = step.graph.samples
    made: dict[tuple[str, int], Any] = {}
    for one in graph.nodes:
        name, _, place = one.name.partition("@")
        given = [made[source] for source in one.inputs]
        if one.role == "input":
            number = int(place) * share
            made[one.name, 0] = batch[int(name[-1])][number : number + share]
        elif one.role == "state":
            made[one.name, 0] = states[one.name]
        elif one.operator in ("mean", "all_reduce"):
            mean = torch.stack(given).mean(0)
            made |= {(one.name, i): mean.clone() for i in range(len(one.outputs))}
        else:
            results = enumerate(run_part(node[name], given))
            made |= {(one.name, i): result for i, result in results}


@pytest.mark.parametrize("weights", ["shared", "mirrored"])
def test_replicas_together_take_the_step_of_the_whole_batch(weights: Any) -> None:
    model = ResidualMLP().double()
    inputs, targets = vectors(12)
    batch = inputs.double(), targets
    step = capture_step(model, (batch[0][:4], targets[:4]), loss=F.cross_entropy)
    graph = data_parallel(step.graph, 3, weights)
    mirrored = weights == "mirrored"
    states = {
        f"{name}@{i}" if mirrored else name: one.clone()
        for name, one in step.states.items()
        for i in range(3 if mirrored else 1)
    }
    for _ in range(3):  # as many as the plain loop's
        carried_out(graph, step, batch, states)
    plain_loop(model, batch, F.cross_entropy, torch.optim.AdamW)
    for name, one in model.named_parameters():
        for place in ("@0", "@1", "@2") if mirrored else ("",):
            found = states[identifier(name) + place]
            assert torch.allclose(found, one, rtol=1e-9, atol=1e-12), name
