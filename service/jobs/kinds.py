"""What may be submitted: each kind of job is a typed request and the use case that answers it."""

import contextlib
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from stagewright.formulations.forms.answers import OnProgress, StopToken
from stagewright.formulations.parallelism.trials import Tuning
from stagewright.graphs.documents.errors import InputError
from stagewright.service.answers import Answer
from stagewright.service.cloud.requests import CloudRequest
from stagewright.service.clusters.requests import (
    AllocateRequest,
    RoundsRequest,
    SimulateClusterRequest,
)
from stagewright.service.jobs.records import ServiceJob
from stagewright.service.layouts.configured import (
    CalibrateRunsRequest,
    ConfiguredRequest,
    LayoutMemoryRequest,
    TrainPlanRequest,
    TuneModelRequest,
)
from stagewright.service.layouts.profiled import ProfiledRequest
from stagewright.service.layouts.rates import CalibrateRequest
from stagewright.service.layouts.requests import LayoutRequest, MemoryRequest
from stagewright.service.layouts.tuning import TuneReadRequest, TuneRequest
from stagewright.service.operators.dividing import DivideRequest
from stagewright.service.operators.plans import PlaceRequest
from stagewright.service.pipelines.requests import PartitionRequest, PlanRequest
from stagewright.service.pipelines.sweeping import SweepRequest
from stagewright.service.requests import Request
from stagewright.service.schedules.requests import (
    CompareSchedulesRequest,
    JobShopRequest,
    MemoryCurveRequest,
    ScheduleRequest,
)

MODULES = "stagewright.service."


@dataclass(frozen=True, slots=True)
class JobKind:
    """A kind of job.

    ``function`` names the use case, ``MODULE:NAME`` below ``stagewright.service``: solvers are
    imported where a job is answered, not where it is submitted. ``reports``: it tells of progress.
    ``refuses`` names, in the same way, the function of a request by which the use case refuses
    what it cannot answer, before it searches; a request is validated by the same one. A kind
    without it takes every request that can be made.
    ``timed``: costs are seconds, else they are in the unit of the request. ``configured`` is the
    form that people send: it has a model's configuration and makes the request.
    """

    request: type[Request]
    function: str
    summary: str
    refuses: str | None = None
    reports: bool = False
    timed: bool = False
    configured: type[ConfiguredRequest] | None = None

    @property
    def forms(self) -> tuple[type[Request], ...]:
        """The types of what may be sent, that of people first."""
        return (self.request,) if self.configured is None else (self.configured, self.request)

    def parse(self, text: str | bytes) -> Request:
        """The request in a JSON text, of the form that has its first field or else the other.

        Raises
        ------
        InputError
            In one line with the place in the document.
        """
        form = self.configured
        if form is None or self._is_whole(text):
            return self.request.parse(text)
        return form.parse(text).whole()

    def _is_whole(self, text: str | bytes) -> bool:
        try:
            found = from_json(text)
        except ValueError:
            return True  # what is wrong with it is said where it is parsed
        first = next(name for name, of in self.request.model_fields.items() if of.is_required())
        return isinstance(found, dict) and first in found and "config" not in found

    def require_answerable(self, request: Request) -> None:
        """Refuse what the use case refuses."""
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


KINDS: dict[str, JobKind] = {
    "plan": JobKind(PlanRequest, "pipelines.planning:plan", "A plan of a model on a cluster.",
        "pipelines.planning:require_supported", True, True),
    "train-plan": JobKind(LayoutRequest, "layouts.searching:find_layouts",
        "How to divide a transformer's training.", "layouts.requests:require_problem", True, True,
        TrainPlanRequest),
    "train-plan-profiles": JobKind(ProfiledRequest, "layouts.profiled:find_profiled_plan",
        "Training by measured layers.", timed=True),
    "memory": JobKind(MemoryRequest, "layouts.explaining:layout_memory",
        "The memory of a layout.", "layouts.requests:require_problem",
        configured=LayoutMemoryRequest),
    "calibrate": JobKind(CalibrateRequest, "layouts.rates:calibrate",
        "Rates of your own runs.", configured=CalibrateRunsRequest),
    "tune": JobKind(TuneRequest, "layouts.tuning:tune", "Layouts to try on the machines.",
        "layouts.tuning:require_problem", configured=TuneModelRequest),
    "tune-read": JobKind(TuneReadRequest, "layouts.tuning:read_trials", "What trials tell.",
        "layouts.tuning:with_trials"),
    "what-if": JobKind(PlanRequest, "pipelines.what_if:what_if",
        "What more devices or memory would buy.", "pipelines.planning:require_supported"),
    "place": JobKind(PlaceRequest, "operators.plans:place", "Operators on devices.",
        "operators.plans:require_placeable", True, True),
    "partition": JobKind(PartitionRequest, "pipelines.partitioning:partition", "Stages of a model.",
        "pipelines.partitioning:require_method", timed=True),
    "schedule": JobKind(ScheduleRequest, "schedules.scheduling:schedule",
        "An order of given stages.", "schedules.scheduling:require_scheduler", True),
    "compare-schedules": JobKind(CompareSchedulesRequest, "schedules.comparing:compare_schedules",
        "All schedules.", "schedules.scheduling:require_scheduler", True),
    "schedule-curve": JobKind(MemoryCurveRequest, "schedules.comparing:schedule_curve",
        "The best for every memory.", reports=True),
    "jobshop": JobKind(JobShopRequest, "schedules.scheduling:jobshop", "A job shop.",
        "schedules.scheduling:require_scheduler", True),
    "sweep": JobKind(SweepRequest, "pipelines.sweeping:sweep", "Plans of many sizes.",
        "pipelines.sweeping:require_planned"),
    "divide": JobKind(DivideRequest, "operators.dividing:divide", "Operators in sets.",
        "operators.dividing:problem_of", True),
    "allocate": JobKind(AllocateRequest, "clusters.allocating:allocate",
        "Jobs on a cluster's devices.", "clusters.allocating:require_allocatable", True),
    "rounds": JobKind(RoundsRequest, "clusters.rounds:rounds", "Rounds of an allocation.",
        "clusters.rounds:require_realisable", True),
    "simulate-cluster": JobKind(SimulateClusterRequest, "clusters.simulation:simulate_cluster",
        "A cluster of jobs.", "clusters.simulation:require_simulable"),
    "cloud": JobKind(CloudRequest, "cloud.renting:cloud", "Training on rented machines.",
        "cloud.renting:switching_problem"),
}  # fmt: skip


def kind_of(request: Request) -> str:
    """The kind of job that a request is of; of a plan it is ``plan``.

    Raises
    ------
    InputError
        If there is none: it is answered by the library alone.
    """
    for name, kind in KINDS.items():
        if type(request) in kind.forms:
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
    return KINDS[kind].parse(text)


def seconds_of(request: Request) -> float | None:
    """How long a request may be searched for; None if it says no limit."""
    limit = request.given().get("time_limit")
    return limit and limit * len(request.points if isinstance(request, SweepRequest) else (0,))


_LEAST_SECONDS = 1.0  # of a search that goes on


def rest_of(job: ServiceJob) -> str:
    """The request for the next process of a job, which has the rest of its time limit.

    One that gave way goes on from its best plan, if its planner can.
    """
    if not job.spent_seconds or job.limit_seconds is None:
        return job.request
    left = max(_LEAST_SECONDS, job.limit_seconds - job.spent_seconds)
    rest = json.loads(job.request) | {"time_limit": left}
    if job.kind == "plan" and job.document is not None:
        with contextlib.suppress(InputError):
            text = json.dumps(rest | {"start": json.loads(job.document)})
            KINDS[job.kind].require_answerable(parse_request(job.kind, text))
            return text
    return json.dumps(rest)


def title_of(request: Request) -> str:
    """The names of the model and the machines that a request is about; empty where it has none."""
    documents = [getattr(request, part, None) for part in ("chain", "graph", "cluster")]
    names = [getattr(one, "name", "") for one in documents]
    of = request.tuning if isinstance(request, TuneReadRequest) else request
    if isinstance(of, LayoutRequest | MemoryRequest | TuneRequest | Tuning):
        problem = of.problem
        names = [problem.architecture.name, f"{problem.fabric.devices} {problem.fabric.device}"]
    title = " on ".join(filter(None, names))
    return "".join(filter(str.isprintable, title))  # PostgreSQL stores no NUL
