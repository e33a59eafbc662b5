"""Least latency of one sample through an operator graph (Tarnawski et al., NeurIPS 2020, app. A).

The rules, for one subgraph per accelerator (q = 1):

- Every node is on one of k equal accelerators, if it is supported there, or on a host. A host never
  keeps a node waiting: there are as many as nodes that could run at once.
- The nodes of an accelerator fit in its memory, and they are contiguous: no path leaves them and
  returns, and accelerators do not wait for each other in a circle.
- A group (a colour class) is on one accelerator as a whole, or on hosts as a whole.
- A node on a host starts when all that it reads is done.
- The nodes of an accelerator run as one call, which starts when all that any of them reads from
  elsewhere is done. It takes the time of each output read from elsewhere, once; of all its nodes;
  and of each of its outputs that is read elsewhere, once. All its outputs are done at its end.
- Between an accelerator and another an output is sent to a host and from there, so both calls pay.
- The cost is the time at which the last node is done.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np

from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Bools, Floats
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import format_bytes
from stagewright.graphs.importers.dnn_partitioning import Workload

HOST = -1
_SAME_COST_MS = 1e-6  # as much as the published program lets costs of one output differ

Home = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LatencyProblem:
    """Place n nodes on accelerators and hosts so that the last one is done early.

    Attributes
    ----------
    names
        Of the nodes.
    edges
        (a, b): node b reads the output of node a; acyclic.
    on_accelerator, on_host
        Seconds of each node, shape (n,).
    transfer
        Seconds to move the output of each node between an accelerator and a host, shape (n,).
    bytes
        Of each node, shape (n,).
    supported
        Whether each node can be on an accelerator, shape (n,).
    groups
        Nodes that are together; no node is in two groups.
    accelerators
        Their number.
    memory
        Bytes of each accelerator.
    hosts
        Whether nodes may be on hosts.
    """

    names: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]
    on_accelerator: Floats
    on_host: Floats
    transfer: Floats
    bytes: Floats
    supported: Bools
    groups: tuple[tuple[int, ...], ...]
    accelerators: int
    memory: float
    hosts: bool = True

    def __post_init__(self) -> None:
        n = len(self.names)
        if not n or self.accelerators < 0 or not (self.accelerators or self.hosts):
            raise InputError("there must be a node and a device")
        for name in ("on_accelerator", "on_host", "transfer", "bytes", "supported"):
            values = getattr(self, name)
            if values.shape != (n,):
                raise InputError(f"{name} must have the shape {(n,)}, got {values.shape}")
            if not (sum(values.tolist()) < np.inf and (values >= 0).all()):
                raise InputError(f"{name} must be finite and not negative, also in sum")
        grouped = [v for group in self.groups for v in group]
        for nodes in (*self.edges, grouped):
            if not all(0 <= v < n for v in nodes) or len(set(nodes)) < len(nodes):
                raise InputError(f"edges and groups must be of different nodes below {n}: {nodes}")
        graph = nx.DiGraph(self.edges)
        if not nx.is_directed_acyclic_graph(graph):
            cycle = " -> ".join(self.names[a] for a, _ in nx.find_cycle(graph))
            raise InputError(f"the nodes form a cycle: {cycle}")

    def evaluate(self, home: Sequence[int]) -> float:
        """Check every rule; the seconds until the last node is done.

        ``home`` has the accelerator of each node, or ``HOST``.

        Raises InvalidPlan if a rule is broken; the message names the first one.
        """
        return max(self.done(home))

    def done(self, home: Sequence[int]) -> list[float]:
        """Seconds until the output of each node is available; see `evaluate`."""
        self._require_devices(home)
        self._require_memory(home)
        n = len(self.names)
        # The calls are 0 to k - 1; node v on a host is n + v.
        unit = [home[v] if home[v] != HOST else self.accelerators + v for v in range(n)]
        quotient: nx.DiGraph[int] = nx.DiGraph()
        quotient.add_nodes_from(unit)
        quotient.add_edges_from((unit[a], unit[b]) for a, b in self.edges if unit[a] != unit[b])
        if not nx.is_directed_acyclic_graph(quotient):
            (a, b) = nx.find_cycle(quotient)[0][:2]
            raise InvalidPlan(
                f"accelerator {min(a, b)} is not contiguous: a path leaves and returns"
            )
        took = self.call_seconds(home)
        end: dict[int, float] = {}
        for one in nx.topological_sort(quotient):
            start = max((end[other] for other in quotient.predecessors(one)), default=0.0)
            own = took[one] if one < self.accelerators else self.on_host[one - self.accelerators]
            end[one] = start + float(own)
        return [end[one] for one in unit]

    def call_seconds(self, home: Sequence[int]) -> list[float]:
        """The time that the call of each accelerator takes, with its transfers."""
        took = [0.0] * self.accelerators
        for v, device in enumerate(home):
            if device != HOST:
                took[device] += float(self.on_accelerator[v])
        crossing = {(a, home[b]) for a, b in self.edges if home[a] != home[b]}
        for a, device in crossing:
            if device != HOST:
                took[device] += float(self.transfer[a])
        for a in {a for a, _ in crossing if home[a] != HOST}:
            took[home[a]] += float(self.transfer[a])
        return took

    def _require_devices(self, home: Sequence[int]) -> None:
        if len(home) != len(self.names):
            raise InvalidPlan(f"{len(home)} places for {len(self.names)} nodes")
        for v, device in enumerate(home):
            if not HOST <= device < self.accelerators:
                raise InvalidPlan(f"{self.names[v]}: there is no accelerator {device}")
            if device == HOST and not self.hosts:
                raise InvalidPlan(f"{self.names[v]} is on a host, there are none")
            if device != HOST and not self.supported[v]:
                raise InvalidPlan(f"{self.names[v]} does not run on an accelerator")
        for group in self.groups:
            if len({home[v] for v in group}) > 1:
                raise InvalidPlan(f"{self.names[group[0]]} and its group are not together")

    def _require_memory(self, home: Sequence[int]) -> None:
        held: dict[int, float] = defaultdict(float)
        for v, device in enumerate(home):
            held[device] += float(self.bytes[v])
        for device, total in held.items():
            if device != HOST and total > self.memory * (1 + RELATIVE_TOLERANCE):
                raise InvalidPlan(
                    f"{format_bytes(total)} on accelerator {device} of {format_bytes(self.memory)}"
                )


def latency_problem(workload: Workload) -> LatencyProblem:
    """The problem of an inference workload; hosts unless it has none.

    Raises
    ------
    InputError
        If a node is of the backward pass, or the costs of a node's edges differ.
    """
    place = {node.id: v for v, node in enumerate(workload.nodes)}
    classes: dict[int, list[int]] = defaultdict(list)
    for v, node in enumerate(workload.nodes):
        if node.is_backward_node:
            raise InputError(f"{node.label!r} is a backward node: latency is of inference")
        if node.color_class is not None:
            classes[node.color_class].append(v)
    costs: dict[int, float] = {}
    for edge in workload.edges:
        v = place[edge.source_id]
        if abs(costs.setdefault(v, edge.cost) - edge.cost) > _SAME_COST_MS:
            label = workload.nodes[v].label
            raise InputError(f"{label!r} has edges of costs {costs[v]} and {edge.cost}")
    nodes = workload.nodes
    return LatencyProblem(
        names=tuple(node.label for node in nodes),
        edges=tuple((place[edge.source_id], place[edge.dest_id]) for edge in workload.edges),
        on_accelerator=np.array([node.fpga_latency for node in nodes]) / 1e3,
        on_host=np.array([node.cpu_latency for node in nodes]) / 1e3,
        transfer=np.array([costs.get(v, 0.0) for v in range(len(nodes))]) / 1e3,
        bytes=np.array([node.size for node in nodes]),
        supported=np.array([node.supported_on_fpga for node in nodes], dtype=bool),
        groups=tuple(tuple(group) for group in classes.values() if len(group) > 1),
        accelerators=workload.max_devices,
        memory=workload.max_bytes,
        hosts=workload.max_hosts > 0,
    )
