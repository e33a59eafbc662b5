"""The problem of a training step: a graph of operators on a cluster."""

import numpy as np

from stagewright.formulations.operators.problem import Contention, OperatorProblem
from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.operators.step_graph import WITHOUT_TIME, StepGraph


def operator_problem(
    graph: StepGraph, cluster: Cluster, contention: Contention = "none"
) -> OperatorProblem:
    """Placement and order of the operators of ``graph`` on the devices of ``cluster``.

    What a node must come after is a tensor of no bytes, which takes a link's latency from another
    device. An output that shares memory holds as much as what it is a view of, also while that is
    there itself: more than is needed, never less.
    """
    held = _held_bytes(graph)
    tensors = sorted(
        [
            *(
                (i, number, output.bytes, held[i, number])
                for i, node in enumerate(graph.nodes)
                for number, output in enumerate(node.outputs)
            ),
            *((i, number, 0.0, 0.0) for i, number in {*_ends(graph).values()}),
        ]
    )
    readers = _readers(graph)
    rows = [sorted(readers.get((i, number), ())) for i, number, *_ in tensors]
    kinds = [device.kind for device in cluster.devices]
    size = len(cluster)
    return OperatorProblem(
        names=tuple(node.name for node in graph.nodes),
        devices=tuple(device.name for device in cluster.devices),
        seconds=np.array(
            [[node.seconds.get(kind, 0.0) for kind in kinds] for node in graph.nodes], dtype=float
        ),
        maker=np.array([i for i, *_ in tensors], dtype=np.int64),
        output=np.array([number for _, number, *_ in tensors], dtype=np.int64),
        first_reader=np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64),
        reader=np.array([j for row in rows for j in row], dtype=np.int64),
        sent_bytes=np.array([sent for _, _, sent, _ in tensors], dtype=float),
        held_bytes=np.array([kept for *_, kept in tensors], dtype=float),
        latency=np.where(np.eye(size, dtype=bool), 0.0, cluster.latency),
        seconds_per_byte=np.where(np.eye(size, dtype=bool), 0.0, 1.0 / cluster.bandwidth),
        state_bytes=np.array([node.state_bytes for node in graph.nodes], dtype=float),
        memory=np.array([device.memory_bytes for device in cluster.devices], dtype=float),
        group=_groups(graph),
        contention=contention,
        unmeasured=tuple(
            node.name
            for node in graph.nodes
            if node.role not in WITHOUT_TIME and not node.seconds.keys() >= {*kinds}
        ),
    )


def _readers(graph: StepGraph) -> dict[tuple[int, int], set[int]]:
    """The operators that read each (operator, number of its output), or wait for its end."""
    readers: dict[tuple[int, int], set[int]] = {}
    ends = _ends(graph)
    for j, node in enumerate(graph.nodes):
        for name in node.after:
            readers.setdefault(ends[name], set()).add(j)
        for name, number in node.inputs:
            readers.setdefault((graph.index[name], number), set()).add(j)
    return readers


def _ends(graph: StepGraph) -> dict[str, tuple[int, int]]:
    """The tensors that stand for the end of the operators that others must come after."""
    names = {name for node in graph.nodes for name in node.after}
    return {name: (i, len(graph.nodes[i].outputs)) for name in names for i in [graph.index[name]]}


def _held_bytes(graph: StepGraph) -> dict[tuple[int, int], float]:
    """The bytes that each output keeps in its device's memory; none if it is in the state."""
    held: dict[tuple[int, int], float] = {}
    for i, node in enumerate(graph.nodes):
        for number, output in enumerate(node.outputs):
            if output.shared:
                base, of_base = node.inputs[0]
                held[i, number] = held[graph.index[base], of_base]
            else:
                held[i, number] = 0.0 if node.role == "state" else output.bytes
    return held


def _groups(graph: StepGraph) -> Ints:
    """The number of each operator's group; ``beside`` names an operator before it."""
    group: list[int] = []
    count = 0
    for node in graph.nodes:
        if node.beside is None:
            group.append(count)
            count += 1
        else:
            group.append(group[graph.index[node.beside]])
    return np.array(group, dtype=np.int64)
