"""The partition problem of a workload: nodes that must be together become one part."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import networkx as nx
import numpy as np

from stagewright.formulations.dags.problem import DagProblem, DevicePool, PlacedSet, Tensor
from stagewright.formulations.prices.collectives import link_seconds
from stagewright.graphs.importers.dnn_partitioning import Workload, require_accelerators


def dag_problem(
    workload: Workload,
    *,
    contiguous: bool = True,
    hosts: bool = True,
    most_replicas: int = 1,
    bandwidth: float | None = None,
) -> DagProblem:
    """Parts are the nodes that every partition has together.

    Nodes of a colour class are on one device, forward and backward. So are those that contiguous
    sets cannot separate: what lies on a path between two of them. A backward node of a class
    without forward nodes may be anywhere as long as the backward sets are contiguous, in the
    reverse order; backward nodes of other classes go with the forward nodes.

    ``contiguous`` False, for partitions in any order: a part is a colour class alone, or a node
    without one, and there are no edges if they would form a cycle.

    ``hosts``: whether processors are devices too, which no transfer takes time of, as the published
    program counts them.

    ``most_replicas`` of a set exchange the bytes of its nodes, as if all were weights, at the
    ``bandwidth`` of a device in bytes per second (None: at once).

    Raises InputError if a node does not run on an accelerator.
    """
    require_accelerators(workload)
    nodes = {node.id: node for node in workload.nodes}
    home, parts = _together(workload, contiguous)
    edges = {(home[a], home[b]) for a, b in _order(workload)} - {(i, i) for i in range(len(parts))}
    if not nx.is_directed_acyclic_graph(nx.DiGraph(edges)):
        edges = set()
    seconds, backward = np.zeros((2, len(parts), 2))
    held = np.zeros(len(parts))
    for id_, part in home.items():
        took = np.array((nodes[id_].fpga_latency, nodes[id_].cpu_latency)) / 1e3
        seconds[part] += took
        backward[part] += took * nodes[id_].is_backward_node
        held[part] += nodes[id_].size
    made: dict[int, set[int]] = defaultdict(set)
    cost: dict[int, float] = defaultdict(float)
    for edge in workload.edges:
        made[edge.source_id].add(home[edge.dest_id])
        cost[edge.source_id] = max(cost[edge.source_id], edge.cost)
    tensors = []
    for source, readers in made.items():
        members = tuple(sorted(readers | {home[source]}))
        if len(members) > 1 and cost[source] > 0:
            back = bool(nodes[source].is_backward_node)
            tensors.append(Tensor(members, cost[source] / 1e3, back))
    pools = [DevicePool("accelerator", workload.max_devices, workload.max_bytes)]
    pools.append(
        DevicePool("host", workload.max_hosts if hosts else 0, np.inf, pays_transfers=False)
    )
    return DagProblem(
        names=tuple(parts),
        edges=tuple(sorted(edges)),
        seconds=seconds,
        bytes=held,
        tensors=tuple(tensors),
        pools=tuple(pools),
        backward=backward,
        exchange=None if bandwidth is None else link_seconds(held, bandwidth),
        most_replicas=most_replicas,
    )


def members(workload: Workload, contiguous: bool = True) -> tuple[tuple[str, ...], ...]:
    """The names of the nodes of each part, with their numbers where a name is not unique."""
    home, parts = _together(workload, contiguous)
    count = Counter(node.label for node in workload.nodes)
    found: list[list[str]] = [[] for _ in parts]
    for node in workload.nodes:
        unique = count[node.label] == 1
        found[home[node.id]].append(node.label if unique else f"{node.label} ({node.id})")
    return tuple(map(tuple, found))


def in_any_order(workload: Workload, sets: Sequence[PlacedSet]) -> tuple[PlacedSet, ...]:
    """Sets of a contiguous partition, written with the smaller parts of partitions in any order."""
    strict, loose = (_together(workload, contiguous)[0] for contiguous in (True, False))
    within: dict[int, set[int]] = defaultdict(set)
    for id_, part in strict.items():
        within[part].add(loose[id_])
    return tuple(
        replace(one, parts=tuple(sorted({v for part in one.parts for v in within[part]})))
        for one in sets
    )


def _together(workload: Workload, contiguous: bool) -> tuple[dict[int, int], list[str]]:
    """The part of every node, and the names of the parts, in a topological order if there is one.

    Not ``contiguous``: the classes alone.
    """
    graph: nx.DiGraph[int] = nx.DiGraph(_order(workload) if contiguous else ())
    graph.add_nodes_from(node.id for node in workload.nodes)
    for members in _classes(workload).values():
        nx.add_cycle(graph, members)
    condensed = nx.condensation(graph)
    labels = {node.id: node.label for node in workload.nodes}
    order = nx.lexicographical_topological_sort(
        condensed, key=lambda part: min(condensed.nodes[part]["members"])
    )
    home: dict[int, int] = {}
    names = []
    for number, part in enumerate(order):
        members = sorted(condensed.nodes[part]["members"])
        home |= dict.fromkeys(members, number)
        names.append(labels[members[0]])
    return home, names


def _classes(workload: Workload) -> dict[int, list[int]]:
    """The nodes of every colour class."""
    classes: dict[int, list[int]] = defaultdict(list)
    for node in workload.nodes:
        if node.color_class is not None:
            classes[node.color_class].append(node.id)
    return classes


def _order(workload: Workload) -> list[tuple[int, int]]:
    """Pairs (a, b) of nodes: the set of a is not after the set of b."""
    backward = {node.id for node in workload.nodes if node.is_backward_node}
    forward_classes = {node.color_class for node in workload.nodes if not node.is_backward_node} - {
        None
    }
    free = {
        node.id
        for node in workload.nodes
        if node.is_backward_node and node.color_class not in forward_classes
    }
    pairs = []
    for edge in workload.edges:
        ends = (edge.source_id, edge.dest_id)
        if not backward.intersection(ends):
            pairs.append(ends)
        elif backward.issuperset(ends) and free.intersection(ends):
            pairs.append(ends[::-1])
    return pairs
