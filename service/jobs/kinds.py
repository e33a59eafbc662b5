"""What may be submitted: each kind of job is a typed request and the use case that answers it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stagewright.formulations.forms.answers import OnProgress, StopToken
from stagewright.graphs.documents.errors import InputError
from stagewright.service.answers import Answer
from stagewright.service.cloud_requests import CloudRequest
from stagewright.service.cluster_requests import (
    AllocateRequest,
    RoundsRequest,
    SimulateClusterRequest,
)
from stagewright.service.dividing import DivideRequest
from stagewright.service.operator_plans import PlaceRequest
from stagewright.service.pipeline_requests import (
    CompareSchedulesRequest,
    JobShopRequest,
    MemoryCurveRequest,
    PartitionRequest,
    PlanRequest,
    ScheduleRequest,
)
from stagewright.service.requests import Request
from stagewright.service.sweep_requests import SweepRequest

MODULES = "stagewright.service."


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of job.

    ``function`` names the use case, ``MODULE:NAME`` below ``stagewright.service``: solvers are
    imported where a job is answered, not where it is submitted. ``reports``: it tells of progress.
    ``refuses`` names, in the same way, the function of a request by which the use case refuses
    what it cannot answer, before it searches; a request is validated by the same one. A kind
    without it takes every request that can be made.
    ``timed``: costs are seconds, else they are in the unit of the request.
    """

    request: type[Request]
    function: str
    summary: str
    refuses: str | None = None
    reports: bool = False
    timed: bool = False

    def require_answerable(self, request: Request) -> None:
        """Refuse what the use case refuses.

        Raises
        ------
        InputError
            In the use case's own line.
        """
        if self.refuses is not None:
            _function(self.refuses)(request)

    def answer(self, request: Request, on_progress: OnProgress, stop: StopToken) -> Answer:
        """Answer a request of this kind."""
        use_case: Callable[..., Answer] = _function(self.function)
        given: dict[str, Any] = {"on_progress": on_progress} if self.reports else {}
        return use_case(request, stop=stop, **given)


def _function(place: str) -> Callable[..., Any]:
    """The function at ``MODULE:NAME``."""
    module, name = place.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(MODULES + module), name)
    return found


KINDS: dict[str, Kind] = {
    "plan": Kind(
        PlanRequest, "planning:plan", "A plan of a model on a cluster.",
        "planning:require_supported", True, True,
    ),
    "what-if": Kind(
        PlanRequest, "what_if:what_if", "What more devices or memory would buy.",
        "planning:require_supported",
    ),
    "place": Kind(
        PlaceRequest, "operator_plans:place", "Operators on devices.",
        "operator_plans:require_placeable", True, True,
    ),
    "partition": Kind(
        PartitionRequest, "partitioning:partition", "Stages of a model.",
        "partitioning:require_method", timed=True,
    ),
    "schedule": Kind(
        ScheduleRequest, "scheduling:schedule", "An order of given stages.",
        "scheduling:require_scheduler", True,
    ),
    "compare-schedules": Kind(
        CompareSchedulesRequest, "comparing_schedules:compare_schedules", "All schedules.",
        "scheduling:require_scheduler", True,
    ),
    "schedule-curve": Kind(
        MemoryCurveRequest, "memory_curves:schedule_curve", "The best for every memory.",
        reports=True,
    ),
    "jobshop": Kind(
        JobShopRequest, "scheduling:jobshop", "A job shop.", "scheduling:require_scheduler", True
    ),
    "sweep": Kind(
        SweepRequest, "sweeping:sweep", "Plans of many sizes.", "sweeping:require_planned"
    ),
    "divide": Kind(
        DivideRequest, "dividing:divide", "Operators in sets.", "dividing:problem_of", True
    ),
    "allocate": Kind(
        AllocateRequest, "allocating:allocate", "Jobs on a cluster's devices.",
        "allocating:require_allocatable",
    ),
    "rounds": Kind(
        RoundsRequest, "allocating:rounds", "Rounds of an allocation.",
        "allocating:require_realisable",
    ),
    "simulate-cluster": Kind(
        SimulateClusterRequest, "cluster_simulation:simulate_cluster", "A cluster of jobs.",
        "cluster_simulation:require_simulable",
    ),
    "cloud": Kind(
        CloudRequest, "cloud:cloud", "Training on rented machines.", "cloud:switching_problem"
    ),
}  # fmt: skip


def kind_of(request: Request) -> str:
    """The kind of job that a request is of; of a plan it is ``plan``.

    Raises
    ------
    InputError
        If there is none: it is answered by the library alone.
    """
    for name, kind in KINDS.items():
        if type(request) is kind.request:
            return name
    raise InputError(f"a {type(request).__name__} is no job of the service")


def parse_request(kind: str, text: str | bytes) -> Request:
    """The request of a kind in a JSON text.

    Raises
    ------
    InputError
        If there is no such kind, or in one line with the place in the document.
    """
    if kind not in KINDS:
        raise InputError(f"{kind!r} is no kind of job; there are {', '.join(KINDS)}")
    return KINDS[kind].request.parse(text)


def title_of(request: Request) -> str:
    """The names of the model and the cluster that a request is about; empty where it has none."""
    documents = (getattr(request, part, None) for part in ("chain", "graph", "cluster"))
    title = " on ".join(filter(None, (getattr(one, "name", "") for one in documents)))
    return "".join(filter(str.isprintable, title))  # PostgreSQL stores no NUL
