"""The document of a captured graph, which planners of operators read."""

import operator
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from stagewright.executor.capture.steps.splits import splits_of
from stagewright.graphs.models.operators.step_graph import Node, Output, StepGraph

VIEWS = (torch.ops.aten._unsafe_view.default,)  # views whose schema does not say so


def step_graph(name: str, graph: fx.Graph, samples: int) -> StepGraph:
    """The operators of ``graph``, a step on ``samples`` samples, without seconds."""
    return StepGraph(name, "captured, without costs", samples, tuple(_nodes(graph)))


def _nodes(graph: fx.Graph) -> Iterator[Node]:
    memory: dict[fx.Node, fx.Node] = {}  # the node whose memory a node's result is in
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in operators(graph):
        given = [one for one, _ in tensor_inputs(node)]
        shares = bool(given) and (is_view(node) or is_in_place(node))
        memory[node] = memory[given[0]] if shares else node
        yield Node(
            name=node.name,
            operator=operator_name(node),
            role=node.meta["role"],
            inputs=tuple((one.name, number) for one, number in tensor_inputs(node)),
            outputs=tuple(_output(one, shares) for one in results_of(node)),
            state_bytes=bytes_of(node.meta["val"]) if node.meta["role"] == "state" else 0.0,
            beside=given[0].name if shares else node.meta.get("beside"),
            after=tuple(_overtaken(node, given, readers[memory[node]])),
            splits=() if shares else splits_of(node),
            line=node.meta.get("line"),
        )
        for one in dict.fromkeys(given):
            readers[memory[one]].append(node)


def operators(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of the document: inputs, states and calls, without the selection of outputs."""
    for node in graph.nodes:
        if node.op != "output" and node.target is not operator.getitem:
            yield node


def tensor_inputs(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """(operator, number of its output) of every tensor in the arguments, in their order."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return [selected(one) for one in found]


def selected(node: fx.Node) -> tuple[fx.Node, int]:
    """(operator, number of its output) that a node stands for."""
    if node.target is operator.getitem:
        source, number = node.args
        return source, number  # type: ignore[return-value]
    return node, 0


def operator_name(node: fx.Node) -> str:
    """The operator of a node, such as ``aten.mm``; the kind of an input or a state."""
    if node.op == "placeholder":
        return str(node.meta["role"])
    return str(node.target.overloadpacket)  # type: ignore[union-attr]


def results_of(node: fx.Node) -> list[Tensor | None]:
    """The tensors that a node makes; None for an output that is left out."""
    value: Any = node.meta["val"]
    return list(value) if isinstance(value, list | tuple) else [value]


def is_view(node: fx.Node) -> bool:
    """Whether the results share the memory of the first input."""
    if node.op == "placeholder":
        return False
    returned = node.target._schema.returns  # type: ignore[union-attr]
    shares = bool(returned) and returned[0].alias_info is not None
    return node.target in VIEWS or (shares and not is_in_place(node))


def is_in_place(node: fx.Node) -> bool:
    """Whether the node changes its first input."""
    return node.op == "call_function" and bool(node.target._schema.is_mutable)  # type: ignore[union-attr]


def _overtaken(node: fx.Node, given: list[fx.Node], readers: list[fx.Node]) -> list[str]:
    """Readers of the memory that ``node`` changes, which must run before ``node``."""
    if not is_in_place(node):
        return []
    return [one.name for one in readers if one not in given]


def _output(value: Tensor | None, shared: bool) -> Output:
    if value is None:
        return Output(0.0)
    return Output(bytes_of(value), tuple(value.shape), shared)


def bytes_of(value: Tensor) -> float:
    """Bytes of the different elements: an expanded dimension counts once."""
    strides = zip(value.shape, value.stride(), strict=True)
    sizes = [size for size, stride in strides if stride != 0 or size == 0]
    count = 1
    for size in sizes:
        count *= size
    return float(count * value.element_size())
