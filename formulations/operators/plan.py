"""A placement and order of operators as a JSON document."""

import hashlib
import os
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from stagewright.formulations.operators.problem import Contention
from stagewright.formulations.plans.envelope import Envelope
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.operators.step_graph import Role, StepGraph

FORMAT: Literal["stagewright-operators"] = "stagewright-operators"
VERSION: Literal[1] = 1

Plans = Literal["these splits", "any splits"]
"""Every placement and order of the graph with the plan's splits; or with any choice of splits."""


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """An operator of the graph that is divided into ``parts`` along a dimension."""

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    operator: str
    dimension: Literal["batch", "channel"]
    parts: int


@dataclass(frozen=True, slots=True)
class PlacedOperator:
    """When and where an operator runs."""

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    operator: str
    role: Role
    device: str
    start_seconds: float
    finish_seconds: float

    def __post_init__(self) -> None:
        require_amount(self.start_seconds, f"operator {self.operator!r}: start_seconds")
        require_amount(self.finish_seconds, f"operator {self.operator!r}: finish_seconds")


@dataclass(frozen=True, slots=True)
class Transfer:
    """When an output of an operator goes to another ``device``."""

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    operator: str
    output: int
    device: str
    start_seconds: float
    finish_seconds: float

    def __post_init__(self) -> None:
        place = f"transfer of {self.operator!r} to {self.device!r}: "
        require_amount(self.start_seconds, place + "start_seconds")
        require_amount(self.finish_seconds, place + "finish_seconds")


@dataclass(frozen=True, slots=True)
class OperatorBound:
    """A lower bound on the time of all ``plans`` with the contention of this one.

    ``prices``, one per device, are what the bound by load is computed from.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    seconds: float
    proved_by: str
    plans: Plans
    prices: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require_amount(self.seconds, f"bound by {self.proved_by!r}: seconds")


@dataclass(frozen=True, slots=True)
class OperatorCertificate:
    """The plan's time, the best of ``bounds`` and the relative gap between the two.

    ``any_splits_seconds`` is the best bound on plans with any splits.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    cost_seconds: float
    bound_seconds: float
    gap: float
    proved_by: str
    any_splits_seconds: float
    any_splits_gap: float
    any_splits_proved_by: str
    bounds: tuple[OperatorBound, ...]


@dataclass(frozen=True, slots=True)
class OperatorPlan(Envelope):
    """Device, start and finish of every operator and every transfer.

    ``model`` and ``cluster`` are the names of what was planned. ``operators`` are those of the
    graph after ``splits``, in the order of their starts. ``critical`` is the chain of those that
    waited for each other up to the last one (:mod:`critical`), ``peak_memory_bytes`` the most that
    is in each device's memory. ``unmeasured`` took 0 seconds on some device because nothing else is
    known of them. ``digest`` identifies graph, cluster and contention; ``structure`` is that of the
    graph, by which a run knows that a model is the one that was planned.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

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
    format: Literal["stagewright-operators"] = FORMAT
    version: Literal[1] = VERSION

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
    return documents.read(OperatorPlan, path, FORMAT, VERSION)


def save_operator_plan(plan: OperatorPlan, path: str | os.PathLike[str]) -> None:
    """Write a plan atomically."""
    documents.write(OperatorPlan, plan, path)
