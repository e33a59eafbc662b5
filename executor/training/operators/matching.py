"""Whether a model still captures to the graph that was planned."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from stagewright.executor.capture.steps.document import selected
from stagewright.executor.capture.steps.step import CapturedStep
from stagewright.executor.programs.operators.placed import PlacedGraph, Value
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.data_parallel import data_parallel
from stagewright.graphs.models.step_graph import Node, StepGraph

SAME = ("name", "operator", "role", "inputs", "outputs", "state_bytes", "beside", "after", "splits")


def replicas_of(graph: StepGraph) -> int:
    """The replicas of the model in a graph; see ``graphs.models.data_parallel``."""
    inputs = [node.name for node in graph.nodes if node.role == "input"]
    marked = [int(name.partition("@")[2]) for name in inputs if "@" in name]
    return max(marked, default=0) + 1


def share_of(batch: tuple[Any, Any], graph: StepGraph, number: int = 0) -> tuple[Any, Any]:
    """The mini-batch of replica ``number``.

    Raises
    ------
    InputError
        If the mini-batch has not the samples of the graph.
    """
    replicas = replicas_of(graph)
    for one in tree_leaves(batch):
        if not isinstance(one, Tensor) or not one.dim() or len(one) != graph.samples:
            found = f"{len(one)}" if isinstance(one, Tensor) and one.dim() else "no"
            raise InputError(
                f"the graph is of mini-batches of {graph.samples} samples, the data have one with "
                f"{found} samples in a tensor"
            )
    size = graph.samples // replicas
    rows = slice(number * size, (number + 1) * size)
    found_share: tuple[Any, Any] = tree_map_only(Tensor, lambda one: one[rows], batch)
    return found_share


def require_same_graph(step: CapturedStep, graph: StepGraph) -> None:
    """Refuse a model that does not capture to ``graph``; times and lines may differ."""
    replicas = replicas_of(graph)
    mirrored = any(node.role == "state" and "@" in node.name for node in graph.nodes)
    captured = data_parallel(step.graph, replicas, "mirrored" if mirrored else "shared")
    for here, there in zip_longest(captured.nodes, graph.nodes):
        if _identity(here) != _identity(there):
            raise InputError(
                f"the model no longer captures to graph {graph.name!r}: {_shown(here)} where the "
                f"graph has {_shown(there)}; capture and plan it again"
            )


def _identity(node: Node | None) -> tuple[Any, ...] | None:
    return None if node is None else tuple(getattr(node, name) for name in SAME)


def _shown(node: Node | None) -> str:
    if node is None:
        return "nothing"
    shapes = ", ".join(str(list(output.shape)) for output in node.outputs)
    return f"{node.name!r} ({node.operator}, {shapes or 'no output'})"


def losses(step: CapturedStep, placed: PlacedGraph, replicas: int) -> dict[str, Value]:
    """The values of the replicas' losses, by the replica's number."""
    (name, number), *_ = _results(step)
    return {str(r): _value(placed, name, number, r) for r in range(replicas)}


def gradients(step: CapturedStep, placed: PlacedGraph) -> dict[str, Value]:
    """The values of the parameters' gradients, by path."""
    _, *results = _results(step)
    return {
        path: _value(placed, name, number, 0)
        for path, (name, number) in zip(step.gradients, results, strict=True)
    }


def _results(step: CapturedStep) -> Iterator[tuple[str, int]]:
    *_, output = step.module.graph.nodes
    for one in output.args[0]:
        node, number = selected(one)
        yield node.name, number


def _value(placed: PlacedGraph, name: str, number: int, replica: int) -> Value:
    """An output of the captured graph in the placed one: averaged, copied or joined."""
    mean = f"{name}.{number}@mean"
    if mean in placed.number:
        return placed.number[mean], 0
    for one in (f"{name}@{replica}", name):
        if one in placed.number:
            return placed.number[one], number
        if f"{one}/join{number}" in placed.number:
            return placed.number[f"{one}/join{number}"], 0
    raise AssertionError(f"{name} is in the graph")
