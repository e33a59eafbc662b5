"""Routes of jobs: list, watch, stop, try again; and of administrators."""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Annotated

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, HTTPException, Query, Request, Response
from pydantic import BaseModel, TypeAdapter
from sqlalchemy.exc import SQLAlchemyError
from sse_starlette import EventSourceResponse, ServerSentEvent

from stagewright.service.http.guard import (
    ID,
    Administrator,
    Changeable,
    Readable,
    Reader,
    Service,
    Serving,
    Submitter,
)
from stagewright.service.http.openapi import GUARDED, Events, JsonText, Responses, answered, refused
from stagewright.service.http.tokens import SEEN_SECONDS, Caller, Scope
from stagewright.service.http.views import EventView, JobPage, JobView, view
from stagewright.service.jobs.overview import Overview, overview
from stagewright.service.jobs.records import Event, JobEnding, ServiceJob, State
from stagewright.service.jobs.store import EVENTS_READ, PAGE, ServiceStore
from stagewright.service.whole_answers import printed

LOOK_SECONDS = 30.0  # between looks at the events of a job of which nothing is told
READERS = CapacityLimiter(4)  # threads that read events, however many streams are woken at once
MOST = 10**18  # of the numbers of events, which databases keep in 64 bits
_NUMBER = re.compile("[0-9]{1,18}")
_OBJECT = answered({"type": "object"})
_TEXTS = {name: {"type": "string"} for name in ("id", "event", "data")}
_EVENT: Responses = {
    200: {"content": {"text/event-stream": {"schema": {"type": "object", "properties": _TEXTS}}}}
}
_News = tuple[ServiceJob | None, list[tuple[int, ServerSentEvent]]]
router = APIRouter(prefix="/v1/jobs", responses=refused(*GUARDED, 404))
administration = APIRouter(prefix="/v1", responses=refused(*GUARDED))


@router.get("")
def list_jobs(
    caller: Reader,
    service: Serving,
    before: Annotated[str | None, Query(pattern=f"^{ID}$")] = None,
    state: State | None = None,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = 20,
    all_users: bool = False,
) -> JobPage:
    """The newest jobs; ``before`` is the ``next`` of the page before."""
    if all_users and not caller.may(Scope.ADMIN):
        raise HTTPException(403, "the jobs of all users need the scope admin")
    user = None if all_users else caller.user
    found = service.store.page(user, before=before, state=state, limit=limit + 1)
    caller.owners.update(one.user for one in found[:limit])
    last = found[limit - 1].id if len(found) > limit else None
    waits = service.waits(found)
    return JobPage(jobs=tuple(view(one, caller, waits) for one in found[:limit]), next=last)


@router.get("/{job}")
def read_job(job: Readable, caller: Reader, service: Serving) -> JobView:
    """A job."""
    return view(job, caller, service.waits([job]))


@router.get("/{job}/answer", responses=_OBJECT | refused(409))
def read_answer(job: Readable, whole: bool = False) -> Response:
    """The answer: the JSON object that the command line prints; ``whole``: with all it carries."""
    if job.answer is None or not job.has_ended:
        code, yet = (404, "") if job.has_ended else (409, " yet")
        raise HTTPException(code, f"there is no answer{yet}")
    return JsonText(job.answer if whole else printed(job.answer))


@router.get("/{job}/request", responses=_OBJECT)
def read_request(job: Readable) -> Response:
    """What was asked."""
    return JsonText(job.request)


@router.delete("/{job}", responses=refused(409))
def stop_job(job: Changeable, caller: Submitter, service: Serving) -> JobView:
    """End a job with its best answer so far."""
    return view(service.store.ask(job.id, JobEnding.STOP), caller)


@router.post("/{job}/abort", responses=refused(409))
def abort_job(job: Changeable, caller: Submitter, service: Serving) -> JobView:
    """End a job at once, without an answer."""
    return view(service.store.ask(job.id, JobEnding.ABORT), caller)


@router.post("/{job}/retry", responses=refused(409))
def retry_job(job: Changeable, caller: Submitter, service: Serving, fresh: bool = False) -> JobView:
    """Queue a job again that is failed or feasible; ``fresh``: any, without what it has found."""
    service.limits.require_room(partial(service.store.queued, job.user), job.limit_seconds)
    found = service.store.retry(job.id, fresh=fresh)
    return view(found, caller, service.waits([found]))


@router.post("/{job}/discard", status_code=204, responses=refused(409))
def discard_job(job: Changeable, service: Serving) -> None:
    """Delete a job that has ended."""
    service.store.discard(job.id)


@router.get("/{job}/history")
def read_history(
    job: Readable, service: Serving, after: Annotated[int, Query(ge=0, lt=MOST)] = 0
) -> list[EventView]:
    """What happened to a job after the event of that number."""
    return [
        EventView(number=one.number, at=one.at, name=one.name, data=json.loads(one.data))
        for one in service.store.events(job.id, after)
    ]


@router.get("/{job}/events", response_class=Events, responses=_EVENT)
async def stream_events(
    request: Request,
    job: Readable,
    caller: Reader,
    service: Serving,
    last_event_id: Annotated[str, Header()] = "",
) -> EventSourceResponse:
    """The history as server-sent events; ``Last-Event-ID`` replays what came after."""
    service.limits.require_watchable(service.streams[caller.user])
    after = int(last_event_id) if _NUMBER.fullmatch(last_event_id) else 0
    told = _stream(service, caller, job.id, after, request)
    return EventSourceResponse(counted(told, service.streams, caller.user))


async def counted(
    told: AsyncIterator[ServerSentEvent], streams: Counter[str], user: str
) -> AsyncIterator[ServerSentEvent]:
    """A stream that is counted while it is read, and ends when the store does not answer."""
    streams[user] += 1
    try:
        with suppress(SQLAlchemyError):  # who reads it asks again, and is told so
            async for one in told:
                yield one
    finally:
        streams[user] -= 1
        if not streams[user]:
            del streams[user]


class Alarm(asyncio.Event):
    """An event of this task's loop that any thread may set.

    ``rung`` is when one did, the last time, or when it was made, on the clock of `time.monotonic`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rung, self._of = time.monotonic(), asyncio.get_running_loop()

    def wake(self) -> None:
        """Set it, from any thread."""
        self.rung = time.monotonic()
        with suppress(RuntimeError):  # the loop has ended
            self._of.call_soon_threadsafe(self.set)


async def _stream(
    service: Service, caller: Caller, job: str, after: int, request: Request
) -> AsyncIterator[ServerSentEvent]:
    """Every event of a job, until it has ended, or the caller may read no more."""
    news = Alarm()
    with service.store.signals.subscribed(news.wake, job=job):
        news.rung = time.monotonic()
        while not await request.is_disconnected():
            news.clear()
            found, told = await _shared(service, job, after, news.rung)
            for number, one in told:
                after = number
                yield one
            more = len(told) == EVENTS_READ
            if not more and (found is None or found.has_ended):
                return
            if not await may_go_on(service, caller, news, 0.0 if more else LOOK_SECONDS):
                return
            if not news.is_set():
                news.rung = time.monotonic()


async def _shared(service: Service, job: str, after: int, since: float) -> _News:
    """The job and its events after that number: one look of all streams that wait for it.

    The look began at ``since`` or later, on the clock of `time.monotonic`.
    """
    began, looks = time.monotonic(), service.looks
    known = looks.get((job, after))
    if known is None or known[0] < since:
        task = asyncio.create_task(run_sync(_read, service.store, job, after, limiter=READERS))
        known = looks[job, after] = began, task

        def forget(ended: asyncio.Task[_News]) -> None:
            if looks.get((job, after)) is known:
                del looks[job, after]
            if not ended.cancelled():
                ended.exception()  # is told to who waits for it, if anybody still does

        task.add_done_callback(forget)
    return await asyncio.shield(known[1])


async def may_go_on(service: Service, caller: Caller, woken: asyncio.Event, seconds: float) -> bool:
    """Wait for news, or so long; whether the caller may read them."""
    ends = time.monotonic() + seconds
    while await run_sync(service.still_admits, caller, limiter=READERS):
        left = ends - time.monotonic()
        if left <= 0 or woken.is_set():
            return True
        with suppress(TimeoutError):
            await asyncio.wait_for(woken.wait(), min(left, SEEN_SECONDS))
    return False


def _read(store: ServiceStore, job: str, after: int) -> _News:
    # The job is read before its events, so that those of its end are not missed.
    return store.get(job), [(one.number, _sent(one)) for one in store.events(job, after)]


def _sent(one: Event) -> ServerSentEvent:
    data = json.dumps(json.loads(one.data) | {"at": one.at})
    return ServerSentEvent(data, event=one.name, id=str(one.number))


LEAST_SECONDS, MOST_SECONDS = 1.0, 4.0  # between overviews of a stream
_JSON = TypeAdapter(Overview)


class CallerView(BaseModel):
    """Who asks, and what they may do."""

    user: str
    scope: Scope


@administration.get("/me")
def read_caller(caller: Reader) -> CallerView:
    """Who you are here, and what your token allows."""
    return CallerView(user=caller.user, scope=caller.scope)


@administration.get("/admin")
def read_overview(caller: Administrator, service: Serving) -> Overview:
    """Who waits and why, workers and what they do, users."""
    return overview(service.store)


@administration.get("/admin/events", include_in_schema=False)  # it never ends
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
