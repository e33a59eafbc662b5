"""A model as a graph of operators, its linearisation into layers; why no order obeys one."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount
from stagewright.graphs.models.chain import Chain, Layer, LayerCost


def waiting_cycle(followers: Sequence[Sequence[int]], awaited: Sequence[int]) -> list[int]:
    """Nodes that wait for each other in a circle, each for the next; the first is repeated last.

    ``followers``: the nodes that wait for each node. ``awaited``: how many nodes each node still
    waits for once no node is ready; at least one is positive.

    Examples
    --------
    >>> waiting_cycle([[1], [2], [1]], [0, 1, 1])
    [1, 2, 1]
    """
    waits_for = {
        after: before
        for before, later in enumerate(followers)
        for after in later
        if awaited[before] > 0
    }
    path = [next(i for i, count in enumerate(awaited) if count > 0)]
    seen: dict[int, int] = {}
    while path[-1] not in seen:
        seen[path[-1]] = len(path) - 1
        path.append(waits_for[path[-1]])
    return path[seen[path[-1]] :]


Edge = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator and its costs for one microbatch.

    ``output_bytes`` are counted once however many operators read the output; ``saved_bytes`` are
    kept from the forward to the backward.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: float = 0.0
    output_bytes: float = 0.0
    saved_bytes: float = 0.0

    def __post_init__(self) -> None:
        for field in self.__dataclass_fields__:
            if field != "name":
                require_amount(getattr(self, field), f"operator {self.name!r}: {field}")


@dataclass(frozen=True)
class OpGraph:
    """Operators and the edges along which outputs flow; acyclic.

    The fields other than ``operators`` and ``edges`` are those of :class:`Chain` and
    :class:`~stagewright.graphs.models.chain.LayerCost`.
    """

    name: str
    source: str
    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...]
    microbatch_size: int = 1
    device_kind: str | None = None
    optimizer_bytes_per_parameter_byte: float = 2.0

    def __post_init__(self) -> None:
        if not self.operators:
            raise InputError(f"operator graph {self.name!r} has no operators")
        names = [operator.name for operator in self.operators]
        known = set(names)
        if len(known) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"two operators are named {twice!r}")
        for edge in self.edges:
            for name in edge:
                if name not in known:
                    raise InputError(
                        f"edge {edge[0]} -> {edge[1]} names {name!r}, which is not an operator"
                    )
        cycle = find_cycle(self.edges)
        if cycle:
            raise InputError(f"the operators form a cycle: {' -> '.join([*cycle, cycle[0]])}")

    def __len__(self) -> int:
        return len(self.operators)

    @cached_property
    def digraph(self) -> "nx.DiGraph[str]":
        """The graph of the operators' names."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(operator.name for operator in self.operators)
        graph.add_edges_from(self.edges)
        return graph


def find_cycle(edges: Iterable[Edge]) -> list[str]:
    """The nodes of one cycle of ``edges`` in their order; empty if there is no cycle."""
    try:
        return [edge[0] for edge in nx.find_cycle(nx.DiGraph(list(edges)))]
    except nx.NetworkXNoCycle:
        return []


def topological_order(graph: OpGraph) -> tuple[str, ...]:
    """The operators' names, each after the operators that it reads from.

    Depth first from the outputs backwards, shallow outputs and deep branches first: a branch
    is contiguous, a source (an embedding, a constant) comes directly before its first reader, and
    a side output directly after its input, so that few outputs are alive at a time. Ties are
    broken by name, with numbers in names by value. The order is a pure function of the graph.
    """
    digraph = graph.digraph
    depth: dict[str, int] = {}
    for name in nx.topological_sort(digraph):
        depth[name] = 1 + max((depth[before] for before in digraph.predecessors(name)), default=0)

    def by_depth(names: Iterable[str], sign: int) -> list[str]:
        return sorted(names, key=lambda name: (sign * depth[name], _natural(name)))

    outputs = [name for name in digraph if digraph.out_degree(name) == 0]
    order: dict[str, None] = {}
    stack = by_depth(outputs, 1)[::-1]
    while stack:
        waiting = [name for name in digraph.predecessors(stack[-1]) if name not in order]
        if waiting:
            stack.append(by_depth(waiting, -1)[0])
        else:
            order.setdefault(stack.pop())
    return tuple(order)


def linearise(graph: OpGraph, *, contract: bool = False) -> Chain:
    """The chain of the graph's operators in topological order, one layer per operator.

    ``output_bytes`` of a layer are all outputs that cross the cut after it: those of every operator
    up to it that some later operator reads, each once. The last layer's are those of its operator.
    ``graph``: the operators. ``contract``: merge into one layer the operators between two
    consecutive cuts that at most one operator's output crosses: parallel branches with one start
    and one end (SPP section V-A). Outputs of zero bytes, such as an absent initial state, do not
    count. Returns names of merged layers are ``first..last``. Backward times are sums, not split
    into parts.
    """
    order = topological_order(graph)
    producers, crossing_bytes = _cuts(graph, order)
    ends = np.flatnonzero(producers <= 1).tolist() if contract else range(len(order))
    by_name = {operator.name: operator for operator in graph.operators}
    layers, start = [], 0
    for end in ends:
        members = [by_name[name] for name in order[start : end + 1]]
        layers.append(_merged(graph, members, float(crossing_bytes[end])))
        start = end + 1
    return Chain(
        graph.name,
        graph.source,
        graph.microbatch_size,
        tuple(layers),
        graph.optimizer_bytes_per_parameter_byte,
    )


def _cuts(graph: OpGraph, order: tuple[str, ...]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """How many non-empty outputs cross the cut after each position, and their bytes."""
    position = {name: i for i, name in enumerate(order)}
    last_reader = {name: position[name] for name in order}
    for producer, reader in graph.edges:
        last_reader[producer] = max(last_reader[producer], position[reader])
    producers, crossing = np.zeros(len(order), dtype=np.int64), np.zeros(len(order))
    for operator in graph.operators:
        alive = slice(position[operator.name], last_reader[operator.name])
        producers[alive] += operator.output_bytes > 0
        crossing[alive] += operator.output_bytes
        if operator.name == order[-1]:
            crossing[-1] = operator.output_bytes
    return producers, crossing


def _merged(graph: OpGraph, members: list[Operator], output_bytes: float) -> Layer:
    first, last = members[0].name, members[-1].name
    cost = LayerCost(
        microbatch_size=graph.microbatch_size,
        forward_seconds=sum(operator.forward_seconds for operator in members),
        saved_bytes=sum(operator.saved_bytes for operator in members),
        output_bytes=output_bytes,
        backward_seconds=sum(operator.backward_seconds for operator in members),
        device_kind=graph.device_kind,
    )
    parameter_bytes = sum(operator.parameter_bytes for operator in members)
    return Layer(first if first == last else f"{first}..{last}", parameter_bytes, (cost,))


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts node9 before node10."""
    pieces: list[str] = re.findall(r"\d+|\D+", name)
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces]
