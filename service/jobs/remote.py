"""Jobs as a client of the planning service is told of them, and how it reads the responses."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from stagewright.formulations.forms.answers import Progress, Status
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.plan_class import PlanClass
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.service.answers import Answer
from stagewright.service.jobs.kinds import parse_request
from stagewright.service.jobs.records import ENDED
from stagewright.service.pipelines.requests import PlanRequest
from stagewright.service.whole_answers import kept_plan, read

if TYPE_CHECKING:
    import httpx
    from httpx_sse import ServerSentEvent

_PLANS = TypeAdapter(PlanClass)
_AWAY = (502, 503, 504)  # the service, behind a proxy, or its store


@dataclass(frozen=True, slots=True)
class Webhook:
    """Whether a webhook was delivered; see `stagewright.service.http.views.DeliveryView`."""

    state: str
    attempts: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobState:
    """A job as the service tells of it; see `stagewright.service.http.views.JobView`."""

    id: str
    kind: str
    user: str
    state: str
    created: float
    cost: float | None
    bound: float | None
    gap: float | None
    stopped_by: str | None
    reason: str
    waits: str
    has_document: bool
    webhook: Webhook | None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened to a job."""

    number: int
    name: str
    data: dict[str, Any]


class ServiceError(InputError):
    """The service refuses: its one line, and ``status``, the code of HTTP."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class UnansweredError(InputError):
    """The job ended without an answer; ``job`` says why."""

    def __init__(self, job: JobState) -> None:
        super().__init__(job.reason or f"the job {job.id} has no answer")
        self.job = job


class LostServiceError(InputError):
    """The service does not answer any more; the job goes on there, and keeps its answer."""

    def __init__(self, url: str, job: str) -> None:
        super().__init__(
            f"{url} does not answer any more; job {job} is kept there: "
            f"stagewright jobs {job} --server {url}"
        )
        self.job = job


def checked(response: "httpx.Response") -> "httpx.Response":
    """The response, if the service did what was asked."""
    if response.is_success:
        return response
    try:
        detail = str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        detail = f"HTTP {response.status_code} of {response.request.url}"
    raise ServiceError(response.status_code, detail)


def state_of(response: "httpx.Response") -> JobState:
    """The job that a response describes."""
    return job_of(checked(response).json())


def job_of(found: Mapping[str, Any]) -> JobState:
    """The job of a JSON object."""
    fields = {name: found[name] for name in JobState.__dataclass_fields__}
    told = fields["webhook"]
    return JobState(**fields | {"webhook": None if told is None else Webhook(**told)})


def plan_of(response: "httpx.Response") -> PipelinePlan:
    """The plan that a response has."""
    return documents.parse(PipelinePlan, checked(response).text, "plan")


def text_or_none(response: "httpx.Response") -> str | None:
    """The text of a response; None if the service has nothing of that name."""
    return None if response.status_code == HTTPStatus.NOT_FOUND else checked(response).text


def answer_of(job: JobState, request: str, answer: str | None, document: str | None) -> Answer:
    """The answer of a job, from the texts of its request, answer and plan."""
    asked = parse_request(job.kind, request)
    if answer is not None:
        return read(answer, asked, document)
    if document is None or not isinstance(asked, PlanRequest):
        raise UnansweredError(job)
    by_user = job.stopped_by == "user"
    status = Status.INTERRUPTED if by_user else Status.FEASIBLE
    return kept_plan(asked, document, status, job.reason)


def event_of(found: "ServerSentEvent") -> JobEvent:
    """The event that the service sends."""
    return JobEvent(int(found.id), found.event, found.json())


def progress_of(event: JobEvent, began: float) -> Progress:
    """The progress of a search that ``began`` then, which an event tells."""
    bound, plans = event.data["bound"], event.data["plans"]
    return Progress(
        time.monotonic() - began,
        event.data["cost"],
        -math.inf if bound is None else bound,
        plans=None if plans is None else _PLANS.validate_python(plans),
        doing=event.data.get("doing", ""),
    )


@dataclass
class Patience:
    """How long a service that does not answer is asked again."""

    seconds: float
    since: float | None = None

    def require(self, error: Exception) -> None:
        """Raise the error if it is no loss of connection, or has lasted for too long."""
        if isinstance(error, ServiceError) and error.status not in _AWAY:
            raise error
        now = time.monotonic()
        self.since = self.since or now
        if now - self.since > self.seconds:
            raise error
