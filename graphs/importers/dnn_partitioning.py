"""The JSON workloads of the dnn-partitioning project (github.com/msr-fiddle/dnn-partitioning).

A workload of "Efficient Algorithms for Device Placement of DNN Graph Operators" (Tarnawski et
al., NeurIPS 2020) lists nodes with a latency on the accelerator in milliseconds and a size in
bytes, and edges with the bytes that flow along them. Training workloads have backward nodes,
which share a colour class with the forward nodes that they belong to.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Protocol, Self, TypeVar

import networkx as nx
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.documents.units import MAX_DEVICES, format_bytes
from stagewright.graphs.models.chain import Chain
from stagewright.graphs.models.operators.opgraph import Operator, OpGraph, linearise

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PlainRecord(BaseModel):
    """A record whose fields are named as here."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class CamelRecord(BaseModel):
    """A record whose fields are named in camel case."""

    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True)


Read = TypeVar("Read", bound=BaseModel)


def read_record(kind: type[Read], path: str | os.PathLike[str]) -> Read:
    """A file as it is written. Raises InputError in one line with the file and the field."""
    try:
        return kind.model_validate_json(documents.read_text(path))
    except ValidationError as error:
        raise InputError(f"{path}: {documents.first_problem(error)}") from None


_Count = Annotated[int, Field(ge=0, le=MAX_DEVICES)]


class WorkloadNode(CamelRecord):
    """An operator: milliseconds on an accelerator and on a processor, and bytes."""

    id: int
    fpga_latency: Amount
    cpu_latency: Amount = 0.0
    size: Amount = 0.0
    is_backward_node: bool = False
    supported_on_fpga: bool = True
    color_class: int | None = None
    name: str | None = None

    @property
    def label(self) -> str:
        """The name, or the number."""
        return self.name or f"node{self.id}"


class WorkloadEdge(CamelRecord):
    """The bytes that flow between two operators; ``cost`` in milliseconds to send them."""

    source_id: int
    dest_id: int
    size: Amount = 0.0
    cost: Amount = 0.0


class Workload(CamelRecord):
    """Operators, the edges between them, and the devices that they are divided among."""

    nodes: list[WorkloadNode]
    edges: list[WorkloadEdge]
    max_devices: _Count = Field(alias="maxFPGAs")
    max_bytes: Amount = Field(alias="maxSizePerFPGA")
    max_hosts: _Count = Field(alias="maxCPUs", default=0)

    @model_validator(mode="after")
    def _require_nodes(self) -> Self:
        require_nodes([node.id for node in self.nodes], self.edges)
        return self


def read_dnn_partitioning(
    path: str | os.PathLike[str],
    *,
    microbatch_size: int = 1,
    device_kind: str | None = None,
    name: str | None = None,
    contract: bool = False,
) -> Chain:
    """The chain of a workload; see :func:`dnn_partitioning_graph` and ``linearise``."""
    graph = dnn_partitioning_graph(
        path, microbatch_size=microbatch_size, device_kind=device_kind, name=name
    )
    return linearise(graph, contract=contract)


def dnn_partitioning_graph(
    path: str | os.PathLike[str],
    *,
    microbatch_size: int = 1,
    device_kind: str | None = None,
    name: str | None = None,
) -> OpGraph:
    """The forward operators of a workload, with the backward time of their colour class.

    * Backward time is shared among the forward operators of the class in proportion to their
      forward times; a backward node without such an operator is counted in the nearest class that
      has one.
    * A forward node without inputs and without latency is a weight: it becomes part of its first
      reader. In workloads without such nodes an operator's size is its output and its weights.
    * The rest of the size is kept for the backward; inference workloads keep nothing.
    * The constraint that forward operators of one class are on one device is dropped.

    Raises InputError in one line with the file and the field, node or edge.

    ``path``: the JSON file. ``microbatch_size``: the batch that was measured; the file does not
    say. ``device_kind``: the kind of device that was measured; by default any, since the file does
    not say. ``name``: name of the model; by default the file's name without its suffix.
    """
    workload = read_workload(path)
    readers = _weight_readers(workload)
    title = name or Path(path).name.removesuffix(".json")
    with naming(path):
        require_accelerators(workload)
        return OpGraph(
            title,
            f"measured: dnn-partitioning workload {Path(path).name} (made for up to "
            f"{workload.max_devices} devices of {format_bytes(workload.max_bytes)}); its batch is "
            f"not given in the file and taken as one microbatch of {microbatch_size}",
            _operators(workload, readers),
            _forward_edges(workload, readers),
            microbatch_size,
            device_kind,
        )


def read_workload(path: str | os.PathLike[str]) -> Workload:
    """The workload as it is written.

    Raises InputError in one line with the file and the field, node or edge.
    """
    return read_record(Workload, path)


class _Edge(Protocol):
    @property
    def source_id(self) -> int: ...
    @property
    def dest_id(self) -> int: ...


def require_nodes(nodes: Sequence[int], edges: Iterable[_Edge]) -> None:
    """Refuse two nodes of one id, and edges to other nodes."""
    ids = set(nodes)
    if len(ids) < len(nodes):
        raise InputError("two nodes have the same id")
    for i, edge in enumerate(edges):
        for id_ in (edge.source_id, edge.dest_id):
            if id_ not in ids:
                raise InputError(f"edges[{i}] names node {id_}, which does not exist")


def require_accelerators(workload: Workload) -> None:
    """Refuse nodes that do not run on an accelerator."""
    for node in workload.nodes:
        if not node.supported_on_fpga:
            raise InputError(
                f"{node.label!r} does not run on an accelerator; graphs with operators for "
                "processors alone are divided for latency only"
            )


def _forward(workload: Workload) -> dict[int, WorkloadNode]:
    return {node.id: node for node in workload.nodes if not node.is_backward_node}


def _forward_edges(
    workload: Workload, without: dict[int, int] | None = None
) -> tuple[tuple[str, str], ...]:
    """Edges between forward nodes, by label, except those that leave the nodes ``without``."""
    nodes = _forward(workload)
    return tuple(
        (nodes[edge.source_id].label, nodes[edge.dest_id].label)
        for edge in workload.edges
        if edge.source_id in nodes and edge.dest_id in nodes
        if edge.source_id not in (without or {})
    )


def _weight_readers(workload: Workload) -> dict[int, int]:
    """The id of each weight's first forward reader, by the weight's id."""
    nodes, targets = _forward(workload), {edge.dest_id for edge in workload.edges}
    readers: dict[int, int] = {}
    for edge in workload.edges:
        weight, reader = nodes.get(edge.source_id), nodes.get(edge.dest_id)
        if weight is None or reader is None or weight.id in targets:
            continue
        if weight.fpga_latency == 0 and weight.size > 0:
            readers[weight.id] = min(reader.id, readers.get(weight.id, reader.id))
    return readers


def _operators(workload: Workload, readers: dict[int, int]) -> tuple[Operator, ...]:
    nodes = _forward(workload)
    training = len(nodes) < len(workload.nodes)
    backward_ms = _backward_milliseconds(workload, readers)
    output_bytes = _output_bytes(workload)
    weight_bytes: dict[int, float] = defaultdict(float)
    for weight, reader in readers.items():
        weight_bytes[reader] += nodes[weight].size
    operators = []
    for id_, node in nodes.items():
        if id_ in readers:
            continue
        inside = 0.0 if readers else max(node.size - output_bytes[id_], 0.0)
        operators.append(
            Operator(
                node.label,
                node.fpga_latency / 1e3,
                backward_ms[id_] / 1e3,
                inside + weight_bytes[id_],
                output_bytes[id_],
                node.size - inside if training else 0.0,
            )
        )
    return tuple(operators)


def _output_bytes(workload: Workload) -> dict[int, float]:
    """The largest edge that leaves each forward node.

    For the last operators, whose output no forward node reads, the largest edge into a backward
    node of their class: a gradient is as large as the output.
    """
    nodes = {node.id: node for node in workload.nodes}
    leaving: dict[int, float] = defaultdict(float)
    entering: dict[int | None, float] = defaultdict(float)
    for edge in workload.edges:
        source, target = nodes[edge.source_id], nodes[edge.dest_id]
        if not target.is_backward_node:
            leaving[source.id] = max(leaving[source.id], edge.size)
        elif source.is_backward_node:
            entering[target.color_class] = max(entering[target.color_class], edge.size)
    return {
        id_: leaving[id_] if id_ in leaving else min(entering[node.color_class], node.size)
        for id_, node in _forward(workload).items()
    }


def _backward_milliseconds(workload: Workload, readers: dict[int, int]) -> dict[int, float]:
    """Backward time per forward operator, which add up to the time of all backward nodes."""
    nodes = _forward(workload)
    classes: dict[int | None, set[int]] = defaultdict(set)
    for id_, node in nodes.items():
        if node.color_class is not None:
            classes[node.color_class].add(readers.get(id_, id_))
    milliseconds = dict.fromkeys(nodes, 0.0)
    for node, colour in _classes_of_backward_nodes(workload, set(classes)):
        members = sorted(classes[colour])
        total = sum(nodes[id_].fpga_latency for id_ in members)
        for id_ in members:
            share = nodes[id_].fpga_latency / total if total else 1 / len(members)
            milliseconds[id_] += node.fpga_latency * share
    return milliseconds


def _classes_of_backward_nodes(
    workload: Workload, known: set[int | None]
) -> list[tuple[WorkloadNode, int | None]]:
    """The class of each backward node if it is ``known``, else the nearest node's class."""
    backward = {node.id: node for node in workload.nodes if node.is_backward_node}
    graph = nx.Graph()
    graph.add_nodes_from(backward)
    graph.add_edges_from(
        (edge.source_id, edge.dest_id)
        for edge in workload.edges
        if edge.source_id in backward and edge.dest_id in backward
    )
    coupled = {id_ for id_, node in backward.items() if node.color_class in known}
    if not backward:
        return []
    if not coupled:
        raise InputError("no backward node shares a colour class with a forward node")
    cells = nx.voronoi_cells(graph, coupled)
    lost = cells.pop("unreachable", set())
    if lost:
        raise InputError(f"{backward[min(lost)].label!r} belongs to no forward node")
    return [
        (backward[id_], backward[centre].color_class)
        for centre, cell in sorted(cells.items())
        for id_ in sorted(cell)
    ]
