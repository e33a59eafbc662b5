"""A placement and order of operators as a JSON document."""

import hashlib
import os
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stagewright.formulations.operators.problem import Contention, OperatorProblem
from stagewright.formulations.plans.envelope import Envelope
from stagewright.formulations.prices.collectives import pace
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.operators.step_graph import WITHOUT_TIME, Role, StepGraph


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
        seconds_per_byte=np.where(np.eye(size, dtype=bool), 0.0, pace(cluster.bandwidth)),
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


Plans = Literal["these splits", "any splits"]
"""Every placement and order of the graph with the plan's splits; or with any choice of splits."""


@documents.record
class SplitChoice:
    """An operator of the graph that is divided into ``parts`` along a dimension."""

    operator: str
    dimension: Literal["batch", "channel"]
    parts: int


@documents.record
class PlacedOperator:
    """When and where an operator runs."""

    operator: str
    role: Role
    device: str
    start_seconds: float
    finish_seconds: float

    def __post_init__(self) -> None:
        require_amount(self.start_seconds, f"operator {self.operator!r}: start_seconds")
        require_amount(self.finish_seconds, f"operator {self.operator!r}: finish_seconds")


@documents.record
class Transfer:
    """When an output of an operator goes to another ``device``."""

    operator: str
    output: int
    device: str
    start_seconds: float
    finish_seconds: float

    def __post_init__(self) -> None:
        place = f"transfer of {self.operator!r} to {self.device!r}: "
        require_amount(self.start_seconds, place + "start_seconds")
        require_amount(self.finish_seconds, place + "finish_seconds")


@documents.record
class OperatorBound:
    """A lower bound on the time of all ``plans`` with the contention of this one.

    ``prices``, one per device, are what the bound by load is computed from.
    """

    seconds: float
    proved_by: str
    plans: Plans
    prices: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require_amount(self.seconds, f"bound by {self.proved_by!r}: seconds")


@documents.record
class OperatorCertificate:
    """The plan's time, the best of ``bounds`` and the relative gap between the two.

    ``any_splits_seconds`` is the best bound on plans with any splits.
    """

    cost_seconds: float
    bound_seconds: float
    gap: float
    proved_by: str
    any_splits_seconds: float
    any_splits_gap: float
    any_splits_proved_by: str
    bounds: tuple[OperatorBound, ...]


@documents.record
class OperatorPlan(Envelope):
    """Device, start and finish of every operator and every transfer.

    ``model`` and ``cluster`` are the names of what was planned. ``operators`` are those of the
    graph after ``splits``, in the order of their starts. ``critical`` is the chain of those that
    waited for each other up to the last one (:mod:`critical`), ``peak_memory_bytes`` the most that
    is in each device's memory. ``unmeasured`` took 0 seconds on some device because nothing else is
    known of them. ``digest`` identifies graph, cluster and contention; ``structure`` is that of the
    graph, by which a run knows that a model is the one that was planned.
    """

    structure: str
    model: str
    cluster: str
    planner: str
    contention: Contention
    operators: tuple[PlacedOperator, ...]
    transfers: tuple[Transfer, ...]
    critical: tuple[str, ...]
    peak_memory_bytes: dict[str, float]
    splits: tuple[SplitChoice, ...] = ()
    certificate: OperatorCertificate | None = None
    unmeasured: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kind: Literal["operators"] = "operators"
    format: Literal["stagewright-operators"] = "stagewright-operators"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        if not self.operators:
            raise InputError("a plan places at least one operator")


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """A device's load in a step: seconds of its operators, and its peak memory in bytes."""

    device: str
    operators: int
    busy_seconds: float
    peak_memory_bytes: float


def loads_of(plan: OperatorPlan) -> tuple[DeviceLoad, ...]:
    """The load of every device of the cluster."""
    placed: dict[str, list[PlacedOperator]] = {device: [] for device in plan.peak_memory_bytes}
    for one in plan.operators:
        placed.setdefault(one.device, []).append(one)
    return tuple(
        DeviceLoad(
            device,
            len(its),
            sum(one.finish_seconds - one.start_seconds for one in its),
            plan.peak_memory_bytes.get(device, 0.0),
        )
        for device, its in placed.items()
    )


def digest_of(graph: StepGraph, cluster: Cluster, contention: Contention) -> str:
    """Digest of the problem that a plan solves: graph and cluster."""
    text = graph.digest() + cluster.digest() + contention
    return hashlib.sha256(text.encode()).hexdigest()


def load_operator_plan(path: str | os.PathLike[str]) -> OperatorPlan:
    """Read a plan; raises InputError, with one line, if it is not valid."""
    return documents.read(OperatorPlan, path)


def save_operator_plan(plan: OperatorPlan, path: str | os.PathLike[str]) -> None:
    """Write a plan atomically."""
    documents.write(OperatorPlan, plan, path)
