"""Routes that submit and validate requests, one for each kind of job."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.hf_config import parse_hf_config
from stagewright.graphs.models.traits import said_parameters
from stagewright.service import tracing
from stagewright.service.http.guard import Service, Serving, Submitter
from stagewright.service.http.identity import LOCAL
from stagewright.service.http.limits import TooManyError
from stagewright.service.http.openapi import GUARDED, Responses, reference, refused, sent
from stagewright.service.http.tokens import Caller
from stagewright.service.http.uploads import resolved
from stagewright.service.http.views import JobView, canonical, view
from stagewright.service.http.webhooks import Webhooks
from stagewright.service.jobs.kinds import KINDS, parse_request, seconds_of, title_of
from stagewright.service.jobs.records import ServiceJob
from stagewright.service.requests import Request as JobRequest
from stagewright.service.tracing import CACHED, SUBMITTED

router = APIRouter(responses=refused(*GUARDED, 408, 413))

KNOWN: Responses = {200: {"model": JobView, "description": "It is known, or its answer is."}}


@dataclass(frozen=True, slots=True)
class Wishes:
    """Priority, idempotency key and webhook of a submitted job."""

    priority: int
    key: str | None
    webhook: str | None


class WebhookView(BaseModel):
    """Where webhooks may go, and the secret that signs yours (Standard Webhooks)."""

    origins: tuple[str, ...]
    secret: str


@router.get("/v1/webhooks")
def read_webhooks(caller: Submitter, service: Serving) -> WebhookView:
    """Where webhooks may go, and how yours are signed."""
    found = _webhooks(service)
    return WebhookView(origins=found.origins, secret=found.secret_of(caller.user))


class ConfigView(BaseModel):
    """What a model's configuration says: its type, blocks, and parameters in words."""

    model_type: str
    layers: int
    parameters: str


@router.post("/v1/config", openapi_extra=sent({"type": "object"}, "config"))
async def describe_config(request: Request, caller: Submitter, service: Serving) -> ConfigView:
    """What a Hugging Face ``config.json`` describes."""
    text = await service.limits.body(request)
    return await run_in_threadpool(_described, service, text)


def _described(service: Service, text: bytes) -> ConfigView:
    service.limits.require_small(text)
    found = parse_hf_config(text.decode(errors="replace"), "config")
    service.limits.require_layers(found)
    return ConfigView(model_type=found.name, layers=found.layers, parameters=said_parameters(found))


def _add(kind: str) -> None:
    """Add the routes that submit and validate requests of a kind of job."""
    one = KINDS[kind]
    first, *others = map(reference, one.forms)
    schema: dict[str, object] = {"anyOf": [first, *others]} if others else {**first}
    body = sent(schema, kind)

    @router.post(
        f"/v1/{kind}",
        summary=one.summary,
        operation_id=f"submit-{kind}",
        status_code=202,
        responses=KNOWN | refused(409),
        openapi_extra=body,
    )
    async def submit(
        request: Request,
        response: Response,
        caller: Submitter,
        service: Serving,
        priority: Annotated[int, Query(ge=-100, le=100)] = 0,
        idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
        webhook: Annotated[str | None, Query(max_length=2000)] = None,
    ) -> JobView:
        text = await service.limits.body(request)
        wishes = Wishes(priority, idempotency_key, webhook)
        found, new = await run_in_threadpool(_submitted, service, kind, text, caller, wishes)
        response.status_code = 202 if new and not found.has_ended else 200
        response.headers["Location"] = f"{service.proxies.root_path}/v1/jobs/{found.id}"
        return view(found, caller, service.waits([found]))

    @router.post(
        f"/v1/{kind}/validate",
        summary=f"Validate without solving: {one.summary}",
        operation_id=f"validate-{kind}",
        openapi_extra=body,
    )
    async def validate(request: Request, caller: Submitter, service: Serving) -> dict[str, bool]:
        text = await service.limits.body(request)
        await run_in_threadpool(_validated, service, kind, text, caller)
        return {"valid": True}


for _kind in KINDS:
    _add(_kind)


def _validated(
    service: Service, kind: str, text: bytes, caller: Caller
) -> tuple[JobRequest, bytes]:
    """A parsed request, and its text with uploaded documents in place of their names."""
    service.limits.require_small(text)
    whole = resolved(service, caller.user, text)
    service.limits.require_counted(whole)
    asked = parse_request(kind, whole)
    service.limits.require_modest(asked)
    KINDS[kind].require_answerable(asked)
    return asked, whole


def _submitted(
    service: Service, kind: str, body: bytes, caller: Caller, wishes: Wishes
) -> tuple[ServiceJob, bool]:
    asked, whole = _validated(service, kind, body, caller)
    if wishes.webhook is not None:
        _webhooks(service).require_allowed(wishes.webhook)
    text, store, seconds = canonical(whole), service.store, seconds_of(asked)
    try:
        service.limits.require_room(partial(store.queued, caller.user), seconds)
    except TooManyError:
        if not store.knows(caller.user, kind, text, wishes.key):
            raise
    user_class = "local" if caller.user == LOCAL.user else caller.scope.value
    found, new = store.submit(
        caller.user, kind, text, wishes.priority, wishes.key, title=title_of(asked),
        webhook=wishes.webhook, user_class=user_class, trace=tracing.current(),
        limit_seconds=seconds,
    )  # fmt: skip
    tracing.tell(job=found.id, kind=kind, user_class=user_class, state=found.state.value)
    SUBMITTED.labels(kind).inc(new)
    CACHED.labels(kind).inc(new and found.cached_from is not None)
    return found, new


def _webhooks(service: Service) -> Webhooks:
    if service.webhooks is None:
        raise InputError("webhook: this service sends none (serve --webhook-origin)")
    return service.webhooks
