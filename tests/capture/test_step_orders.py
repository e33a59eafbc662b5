"""A captured step, and its data-parallel graph, carried out operator by operator in any order."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fastt import MODELS
from models import ResidualMLP, WithBatchNorm, vectors
from profiles import slow_after
from step_loop import STEPS, plain_loop
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves

from stagewright.executor.capture.steps.document import operators
from stagewright.executor.capture.steps.joint import identifier
from stagewright.executor.capture.steps.parts import run_part
from stagewright.executor.capture.steps.step import CapturedStep, capture_step
from stagewright.graphs.models.operators.data_parallel import data_parallel
from stagewright.graphs.models.operators.step_graph import Node, StepGraph


def any_order(graph: StepGraph, seed: int, *, keep_after: bool = True) -> list[Node]:
    """The operators in a random order in which each is after those that the document names."""
    chosen = random.Random(seed)
    left = {
        node.name: {name for name, _ in node.inputs} | set(node.after if keep_after else ())
        for node in graph.nodes
    }
    found = []
    while left:
        ready = [name for name, before in left.items() if not before & left.keys()]
        for name in chosen.sample(ready, (len(ready) + 1) // 2):
            found.append(graph.nodes[graph.index[name]])
            del left[name]
    return found


def carried_out(
    nodes: Sequence[Node], step: CapturedStep, batch: Any, states: dict[str, Tensor]
) -> None:
    """Run operators, of which replica r has the r-th part of the batch."""
    traced = {one.name: one for one in operators(step.module.graph)}
    share = step.graph.samples
    made: dict[tuple[str, int], Any] = {}
    for node in nodes:
        name, _, place = node.name.partition("@")
        given = [made[source] for source in node.inputs]
        if node.role == "input":
            first = int(place or 0) * share
            made[node.name, 0] = tree_leaves(batch)[int(name[-1])][first : first + share]
        elif node.role == "state":
            made[node.name, 0] = states[node.name]
        elif node.operator in ("mean", "all_reduce"):
            mean = torch.stack(given).mean(0)
            made |= {(node.name, i): mean.clone() for i in range(len(node.outputs))}
        else:
            results = enumerate(run_part(traced[name], given))
            made |= {(node.name, i): result for i, result in results}


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double()


CASES = {
    "mlp": (ResidualMLP, vectors(7)),
    "batch-norm": (WithBatchNorm, vectors(7)),
    "lenet": MODELS["lenet"],
    "transformer": MODELS["transformer"],
}


@pytest.mark.parametrize("name", slow_after(3, CASES))
def test_any_order_of_the_document_takes_the_step(name: str) -> None:
    """And without ``after`` some order does not: a weight is updated before it is read."""
    build, batch = CASES[name]
    inputs, targets = batch
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        inputs = inputs.double()
    torch.manual_seed(2)
    step = capture_step(without_dropout(build()), (inputs, targets))
    expected = {key: one.clone() for key, one in step.states.items()}
    step.run(expected, (inputs, targets))

    def is_step(seed: int, **options: bool) -> bool:
        states = {key: one.clone() for key, one in step.states.items()}
        order = any_order(step.graph, seed, **options)
        carried_out(order, step, (inputs, targets), states)
        return all(torch.equal(states[key], one) for key, one in expected.items())

    assert all(is_step(seed) for seed in range(5))
    assert not all(is_step(seed, keep_after=False) for seed in range(20))


@pytest.mark.parametrize("weights", ["shared", "mirrored"])
def test_replicas_together_take_the_step_of_the_whole_batch(weights: Any) -> None:
    model = ResidualMLP().double()
    inputs, targets = vectors(12)
    batch = inputs.double(), targets
    step = capture_step(model, (batch[0][:4], targets[:4]), loss=F.cross_entropy)
    graph = data_parallel(step.graph, 3, weights)
    places = [f"@{i}" for i in range(3)] if weights == "mirrored" else [""]
    states = {name + place: one.clone() for name, one in step.states.items() for place in places}
    for seed in range(STEPS):
        carried_out(any_order(graph, seed), step, batch, states)
    plain_loop(model, batch, F.cross_entropy, torch.optim.AdamW)
    for name, one in model.named_parameters():
        for place in places:
            found = states[identifier(name) + place]
            assert torch.allclose(found, one, rtol=1e-9, atol=1e-12), name
