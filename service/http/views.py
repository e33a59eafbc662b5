"""What the service tells a user about a job."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from stagewright.service.http.problems import in_fields
from stagewright.service.http.tokens import Caller, Scope
from stagewright.service.jobs.records import DeliveryState, ServiceJob, State, StoppedBy


class DeliveryView(BaseModel):
    """Whether a webhook was delivered, after how many attempts, and how the last one failed."""

    model_config = ConfigDict(frozen=True, from_attributes=True)

    state: DeliveryState
    attempts: int
    reason: str


class JobView(BaseModel):
    """A job: where it is in its life, and the best of its answers so far.

    ``cost`` and ``bound`` are in the unit of its kind (seconds of an iteration for plans); times
    are seconds since 1970. ``title`` names the model and the cluster. ``stopped_by`` says what
    ended it before its search was complete, ``waits`` why a queued job waits (its place in your
    turn, how many users wait), and ``webhook`` what became of its webhook.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    kind: str
    title: str
    user: str
    state: State
    priority: int
    created: float
    started: float | None
    finished: float | None
    stopped_by: StoppedBy | None
    cost: float | None
    bound: float | None
    gap: float | None
    reason: str
    waits: str
    cached_from: str | None
    has_document: bool
    webhook: DeliveryView | None


class EventView(BaseModel):
    """Something that happened to a job; ``at`` is seconds since 1970."""

    model_config = ConfigDict(frozen=True)

    number: int
    at: float
    name: str
    data: dict[str, Any]


class JobPage(BaseModel):
    """Jobs, the newest first; ``next`` is the ``before`` of the next page, None on the last."""

    jobs: tuple[JobView, ...]
    next: str | None


def view(job: ServiceJob, caller: Caller, waits: Mapping[str, str] | None = None) -> JobView:
    """A job as the caller may see it: without the id of another user's job that it copies."""
    gap = None
    if job.cost and job.bound is not None:
        gap = (job.cost - job.bound) / job.cost
    own = {
        name: getattr(job, name)
        for name in JobView.model_fields
        if name not in ("gap", "has_document", "reason", "waits", "webhook", "cached_from")
    }
    is_known = caller.may(Scope.ADMIN) or caller.user == job.cached_user
    return JobView(
        **own,
        cached_from=job.cached_from if is_known else None,
        gap=gap,
        reason=in_fields(job.reason),
        waits=(waits or {}).get(job.id, ""),
        has_document=job.document is not None,
        webhook=None if job.delivery is None else DeliveryView.model_validate(job.delivery),
    )


def canonical(text: bytes) -> str:
    """The same JSON value always in the same text, for digests."""
    return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
