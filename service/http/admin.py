"""Routes of administrators: the queue, the workers and the users, now and as they change."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from pydantic import BaseModel, TypeAdapter
from sse_starlette import EventSourceResponse, ServerSentEvent

from stagewright.service.http.guard import Administrator, Reader, Service, Serving
from stagewright.service.http.jobs import READERS, Alarm, counted, may_go_on
from stagewright.service.http.openapi import GUARDED, refused
from stagewright.service.http.tokens import Caller, Scope
from stagewright.service.jobs.overview import Overview, overview
from stagewright.service.jobs.records import State

LEAST_SECONDS, MOST_SECONDS = 1.0, 4.0  # between overviews of a stream
_JSON = TypeAdapter(Overview)
router = APIRouter(prefix="/v1", responses=refused(*GUARDED))


class CallerView(BaseModel):
    """Who asks, and what they may do."""

    user: str
    scope: Scope


@router.get("/me")
def read_caller(caller: Reader) -> CallerView:
    """Who you are here, and what your token allows."""
    return CallerView(user=caller.user, scope=caller.scope)


@router.get("/admin")
def read_overview(caller: Administrator, service: Serving) -> Overview:
    """Who waits and why, workers and what they do, users."""
    return overview(service.store)


@router.get("/admin/events", include_in_schema=False)  # it never ends
async def stream_overviews(
    request: Request, caller: Administrator, service: Serving
) -> EventSourceResponse:
    """The overview as server-sent events, whenever a job is queued, begun, or has ended."""
    service.limits.require_watchable(service.streams[caller.user])
    told = _overviews(service, caller, request)
    return EventSourceResponse(counted(told, service.streams, caller.user))


async def _overviews(
    service: Service, caller: Caller, request: Request
) -> AsyncIterator[ServerSentEvent]:
    news, store = Alarm(), service.store
    with ExitStack() as stack:
        for name in (*State, "asked"):
            stack.enter_context(store.signals.subscribed(news.wake, name=name))
        while not await request.is_disconnected():
            news.clear()
            began = time.monotonic()
            found = await run_sync(overview, store, limiter=READERS)
            yield ServerSentEvent(_JSON.dump_json(found).decode(), event="overview")
            # A store that answers slowly is asked the less often.
            await asyncio.sleep(max(LEAST_SECONDS, 10 * (time.monotonic() - began)))
            if not await may_go_on(service, caller, news, MOST_SECONDS):
                return
