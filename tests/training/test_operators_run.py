"""Placed operators on real processes: the results are those of the plain loop."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fastt import MODELS
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from stagewright.executor.capture.steps.step import capture_step
from stagewright.executor.training.losses import cross_entropy
from stagewright.executor.training.operators.training import (
    OperatorRun,
    OperatorTask,
    train_operators,
)
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.graphs.machines.cluster import Cluster, Link, uniform_servers
from stagewright.graphs.models.step_graph import StepGraph
from stagewright.solvers.operators.planning import plan_operators

STEPS = 3
SEED = 5
ADAM = partial(torch.optim.AdamW, lr=0.01)


def doubled(batch: Any) -> Any:
    return tree_map_only(Tensor, lambda one: one.double() if one.is_floating_point() else one, batch)


def make(name: str) -> nn.Module:
    """Without dropout: an operator draws by its own seed, wherever it runs."""
    model = MODELS[name][0]().double()
    for one in model.modules():
        if isinstance(one, nn.Dropout):
            one.p = 0.0
    return model


def data(name: str) -> Iterator[Any]:
    """Mini-batches that differ."""
    inputs, targets = doubled(MODELS[name][1])
    for step in range(STEPS):
        yield tree_map_only(Tensor, lambda one: one.roll(step, -1), inputs), targets


def graph_of(name: str, kinds: tuple[str, ...] = ("v100",)) -> StepGraph:
    """Times that are as good as random: by the name of the node."""
    step = capture_step(make(name), next(data(name)), optimizer=ADAM, name=name)
    nodes = (
        replace(node, seconds=dict.fromkeys(kinds, 1e-5 * (1 + sum(node.name.encode()) % 7)))
        if node.role in ("forward", "backward", "update")
        else node
        for node in step.graph.nodes
    )
    return replace(step.graph, nodes=tuple(nodes))


def plain(name: str) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    torch.manual_seed(SEED)
    model = make(name)
    optimizer = ADAM(model.parameters())
    losses, gradients = [], []
    for inputs, targets in data(name):
        optimizer.zero_grad()
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        total, count = cross_entropy(model(*given), targets)
        (total / count).backward()
        losses.append((total / count).item())
        gradients.append({path: one.grad.clone() for path, one in model.named_parameters()})
        optimizer.step()
    return losses, gradients, {path: one.detach() for path, one in model.state_dict().items()}


def run(group: Any, rank: int, name: str, plan: OperatorPlan, graph: StepGraph) -> OperatorRun:
    task = OperatorTask(plan, graph, partial(make, name), partial(data, name), ADAM, STEPS, seed=SEED)
    return train_operators(task, "cpu", trace=True, with_gradients=True)


def cluster(ranks: int) -> Cluster:
    return uniform_servers(1, ranks, Link(1e9, 1e-6), kind="v100")


def merged(runs: list[OperatorRun]) -> list[dict[str, Tensor]]:
    steps = zip(*(one.gradients for one in runs), strict=True)
    return [{name: value for each in step for name, value in each.items()} for step in steps]


@pytest.mark.parametrize("world", [2, 3])
def test_lenet_is_the_plain_loop_to_the_bit(world: int, ranks: Any) -> None:
    graph = graph_of("lenet")
    plan = plan_operators(graph, cluster(world), "dpos").plan
    assert plan.transfers
    runs = ranks.run(run, world, "lenet", plan, graph)
    losses, gradients, parameters = plain("lenet")
    assert runs[0].losses == losses
    assert runs[0].parameters.keys() == parameters.keys()
    for path, one in parameters.items():
        assert torch.equal(runs[0].parameters[path], one), path
    for mine, theirs in zip(merged(runs), gradients, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[path], theirs[path]) for path in theirs)
