"""Routes that submit and validate requests, one for each kind of job."""

from typing import Annotated

from fastapi import APIRouter, Header, HTTPException, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from stagewright.service.http.guard import Service, Serving, Submitter
from stagewright.service.http.openapi import GUARDED, Responses, reference, refused
from stagewright.service.http.tokens import Caller, Scope
from stagewright.service.http.uploads import resolved
from stagewright.service.http.views import JobView, canonical, view
from stagewright.service.jobs.kinds import KINDS, parse_request, title_of
from stagewright.service.jobs.records import Job
from stagewright.service.requests import Request as JobRequest

router = APIRouter(responses=refused(*GUARDED, 413))

KNOWN: Responses = {200: {"model": JobView, "description": "It is known, or its answer is."}}


def _add(kind: str) -> None:
    """Submit and validate requests of a kind, whose body is the model of users of Python."""
    one = KINDS[kind]
    content = {"application/json": {"schema": reference(one.request)}}
    body = {"requestBody": {"required": True, "content": content}}

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
    ) -> JobView:
        text = await service.limits.body(request)
        found, new = await run_in_threadpool(
            _submitted, service, kind, text, caller, priority, idempotency_key
        )
        response.status_code = 202 if new and not found.has_ended else 200
        response.headers["Location"] = f"/v1/jobs/{found.id}"
        return view(found)

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
    """The request, and its text with the documents that it names."""
    service.limits.require_shallow(text)
    whole = resolved(service, caller.user, text)
    asked = parse_request(kind, whole)
    service.limits.require_modest(asked)
    return asked, whole


def _submitted(
    service: Service, kind: str, text: bytes, caller: Caller, priority: int, key: str | None
) -> tuple[Job, bool]:
    asked, whole = _validated(service, kind, text, caller)
    if priority > 0 and not caller.may(Scope.ADMIN):
        raise HTTPException(403, "a priority above 0 needs the scope admin")
    service.limits.require_room(service.store.queued(caller.user))
    return service.store.submit(
        caller.user, kind, canonical(whole), priority, key, title=title_of(asked)
    )
