"""A client of the planning service.

Examples
--------
>>> from stagewright.client import Client
>>> with Client("http://127.0.0.1:8754") as client:  # doctest: +SKIP
...     answer = client.solve(PlanRequest.of(chain=chain, cluster=cluster, microbatches=8))
...     answer.plan

Or step by step:

>>> with Client("http://127.0.0.1:8754") as client:  # doctest: +SKIP
...     job = client.plan(chain, cluster, microbatches=8, time_limit=60)
...     for event in client.events(job.id):
...         print(event.name, event.data)
...     plan = client.document(job.id)
"""

import asyncio
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from stagewright.formulations.forms.answers import OnProgress, StopToken, silent
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.chain import Chain
from stagewright.service.answers import Answer
from stagewright.service.jobs.kinds import kind_of
from stagewright.service.jobs.remote import (
    JobEvent,
    JobState,
    LostServiceError,
    Patience,
    ServiceError,
    UnansweredError,
    answer_of,
    checked,
    event_of,
    job_of,
    plan_of,
    progress_of,
    state_of,
    text_or_none,
)
from stagewright.service.requests import Request

try:
    import httpx
    from httpx_sse import ServerSentEvent, aconnect_sse, connect_sse
except ImportError as error:
    raise InputError(f"the client needs {error.name}: pip install 'stagewright[client]'") from None

__all__ = [
    "AsyncClient", "Client", "JobEvent", "JobState", "LostServiceError", "ServiceError",
    "UnansweredError",
]  # fmt: skip

POLL_SECONDS = 0.5
LEAVE_SECONDS = 5.0  # for ending a job that is waited for no more
_PATIENCE = httpx.Timeout(30.0)
_CUT = (httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError)
_LOST = (httpx.TransportError, ServiceError)
_TOLD = (httpx.TransportError, InputError)  # what the service, or its loss, ends a wait with

T = TypeVar("T")
P = ParamSpec("P")
AnyRequest = Request | Mapping[str, Any] | str
"""A request: the model, its fields as plain data, or those as JSON."""


def _made(kind: Callable[..., T], url: str, token: str | None) -> T:
    """A client of httpx, which reads the proxies in the environment when it is made."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        return kind(base_url=url, headers=headers, timeout=_PATIENCE)
    except ImportError:
        raise InputError(
            f"{url}: the environment names a SOCKS proxy: pip install 'httpx[socks]', "
            "or unset ALL_PROXY"
        ) from None


class AsyncClient:
    """The service at ``url``; ``token`` is one that ``stagewright token`` made.

    Every method raises `ServiceError` if the service refuses, and ``httpx.HTTPError`` if it does
    not answer. ``events`` and ``solve`` connect again if a connection is lost, for ``patience``
    seconds.
    """

    def __init__(self, url: str, token: str | None = None, patience: float = 60.0) -> None:
        self.url, self.patience = url, patience
        self._http = _made(httpx.AsyncClient, url, token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _send(self, method: str, url: str, **more: Any) -> httpx.Response:
        return await self._http.request(method, url, **more)

    async def _pause(self, seconds: float = POLL_SECONDS) -> None:
        await asyncio.sleep(seconds)

    async def _stream(self, url: str, after: int) -> AsyncIterator[ServerSentEvent | None]:
        """The events of a job; None first, once the service answers."""
        headers = {"Last-Event-ID": str(after)}
        async with aconnect_sse(self._http, "GET", url, headers=headers) as source:
            yield None
            async for one in source.aiter_sse():
                yield one

    @asynccontextmanager
    async def _submitting(
        self, kind: str, request: Request, stop: StopToken | None
    ) -> AsyncIterator[str]:
        """The job of a request, which ends if the token is set, or if the body is left early.

        What stops the job is not cancelled with the task.
        """
        submitted = asyncio.create_task(self._submitted(kind, request))
        watch = None if stop is None else asyncio.create_task(self._stop_when_set(submitted, stop))
        try:
            yield (await asyncio.shield(submitted)).id
        except _TOLD:
            raise
        except BaseException:
            leaving = asyncio.create_task(self._leave(submitted))
            while not leaving.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({leaving})
            raise
        finally:
            if watch is not None:
                watch.cancel()

    async def _leave(self, submitted: asyncio.Task[JobState]) -> None:
        with suppress(*_LOST, TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self.stop((await submitted).id)

    async def _stop_when_set(self, submitted: asyncio.Task[JobState], stop: StopToken) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS / 5)
            if stop.is_set():
                with suppress(*_LOST):
                    await self.stop((await submitted).id)
                    return

    async def solve(
        self,
        request: Request,
        on_progress: OnProgress = silent,
        stop: StopToken | None = None,
        kind: str | None = None,
    ) -> Answer:
        """The answer to a request, of the same type as the library's own.

        ``on_progress`` is told of every better answer or bound, and ``stop`` ends the search with
        its best answer so far. ``kind`` is that of the request by default; ``what-if`` asks it of
        the request for a plan. An exception that ends the wait, such as KeyboardInterrupt, ends the
        job as well, and so does cancelling the task; the loss of the service does not.

        Raises
        ------
        UnansweredError
            If the job ends without an answer.
        LostServiceError
            If the service goes away after it has taken the request.
        """
        began = time.monotonic()
        async with self._submitting(kind or kind_of(request), request, stop) as job:
            try:
                async for event in self.events(job):
                    if event.name == "progress":
                        on_progress(progress_of(event, began))
                return await self._persistent(lambda: self.answer(job))
            except httpx.TransportError:
                raise LostServiceError(self.url, job) from None

    async def _submitted(self, kind: str, request: Request) -> JobState:
        """Submit once, however often the connection is lost after the service was there."""
        key = uuid.uuid4().hex
        try:
            return await self.submit(kind, request, key=key)
        except _CUT:
            return await self._persistent(lambda: self.submit(kind, request, key=key))

    async def _persistent(self, call: Callable[[], Awaitable[T]]) -> T:
        """What a call returns, which is tried again while the connection is lost."""
        patience = Patience(self.patience)
        while True:
            try:
                return await call()
            except _LOST as error:
                patience.require(error)
                await self._pause()

    async def submit(
        self, kind: str, request: AnyRequest, *, key: str | None = None, priority: int = 0
    ) -> JobState:
        """Submit a request of a kind; with a ``key`` it is submitted once, however often."""
        if isinstance(request, Request):
            request = request.model_dump_json(by_alias=True)
        content = request if isinstance(request, str) else json.dumps(request)
        headers = {} if key is None else {"Idempotency-Key": key}
        asked = {"content": content, "headers": headers, "params": {"priority": priority}}
        return state_of(await self._send("POST", f"/v1/{kind}", **asked))

    async def plan(
        self, chain: Chain, cluster: Cluster, *, key: str | None = None, **options: Any
    ) -> JobState:
        """Submit a plan; ``options`` are the other fields of a `PlanRequest`."""
        parts = {"chain": chain, "cluster": cluster}
        given = {name: json.loads(documents.to_json(one)) for name, one in parts.items()}
        return await self.submit("plan", given | options, key=key)

    async def jobs(self, limit: int = 20) -> list[JobState]:
        """The newest jobs."""
        found = checked(await self._send("GET", "/v1/jobs", params={"limit": limit})).json()
        return [job_of(one) for one in found["jobs"]]

    async def job(self, job: str) -> JobState:
        """A job."""
        return state_of(await self._send("GET", f"/v1/jobs/{job}"))

    async def wait(self, job: str, timeout: float | None = None) -> JobState:
        """A job when it has ended; raises TimeoutError after ``timeout`` seconds."""
        ends = None if timeout is None else time.monotonic() + timeout
        while not (state := await self.job(job)).has_ended:
            if ends is not None and time.monotonic() > ends:
                raise TimeoutError(f"job {job} is still {state.state}")
            await self._pause()
        return state

    async def events(self, job: str, after: int = 0) -> AsyncIterator[JobEvent]:
        """What happens to a job after the event of that number, until it has ended."""
        patience = Patience(self.patience)
        while True:
            try:
                ended = (await self.job(job)).has_ended  # asked first: no event is missed
                async for one in self._stream(f"/v1/jobs/{job}/events", after):
                    patience.since = None
                    if one is not None and one.data:  # not a comment that keeps a connection
                        after = int(one.id)
                        yield event_of(one)
            except _LOST as error:
                patience.require(error)
                await self._pause()
                continue
            if ended:
                return

    async def answer(self, job: str) -> Answer:
        """The answer, of the same type as the library's own.

        Raises
        ------
        UnansweredError
            If the job ended without one.
        """
        state, place = await self.job(job), f"/v1/jobs/{job}"
        request = checked(await self._send("GET", f"{place}/request")).text
        text = text_or_none(await self._send("GET", f"{place}/answer", params={"whole": True}))
        plan = text_or_none(await self._send("GET", f"{place}/plan"))
        return answer_of(state, request, text, plan)

    async def document(self, job: str) -> PipelinePlan:
        """The best plan so far."""
        return plan_of(await self._send("GET", f"/v1/jobs/{job}/plan"))

    async def stop(self, job: str) -> JobState:
        """End a job with its best answer so far."""
        return state_of(await self._send("DELETE", f"/v1/jobs/{job}"))

    async def retry(self, job: str, *, fresh: bool = False) -> JobState:
        """Queue a job again; ``fresh``: even a proved one, without what it has found."""
        return state_of(await self._send("POST", f"/v1/jobs/{job}/retry", params={"fresh": fresh}))

    async def abort(self, job: str) -> JobState:
        """End a job at once, without an answer."""
        return state_of(await self._send("POST", f"/v1/jobs/{job}/abort"))


class _Blocking(AsyncClient):
    """The same calls, none of which waits for an event loop: each returns when it is begun."""

    def __init__(self, url: str, token: str | None, patience: float) -> None:
        self.url, self.patience = url, patience
        self.http = _made(httpx.Client, url, token)

    async def _send(self, method: str, url: str, **more: Any) -> httpx.Response:
        return self.http.request(method, url, **more)

    async def _pause(self, seconds: float = POLL_SECONDS) -> None:
        time.sleep(seconds)

    async def _stream(self, url: str, after: int) -> AsyncIterator[ServerSentEvent | None]:
        headers = {"Last-Event-ID": str(after)}
        with connect_sse(self.http, "GET", url, headers=headers) as source:
            yield None
            for one in source.iter_sse():
                yield one

    @asynccontextmanager
    async def _submitting(
        self, kind: str, request: Request, stop: StopToken | None
    ) -> AsyncIterator[str]:
        job, over = (await self._submitted(kind, request)).id, threading.Event()
        if stop is not None:
            threading.Thread(target=self._watch, args=(job, stop, over), daemon=True).start()
        try:
            yield job
        except _TOLD:
            raise
        except BaseException:
            with suppress(*_LOST):
                checked(self.http.delete(f"/v1/jobs/{job}", timeout=LEAVE_SECONDS))
            raise
        finally:
            over.set()

    def _watch(self, job: str, stop: StopToken, over: threading.Event) -> None:
        while not over.wait(POLL_SECONDS / 5):
            if stop.is_set():
                with suppress(*_LOST):
                    _returned(self.stop(job))
                    return


def _returned(call: Any) -> Any:
    """What a coroutine of `_Blocking` returns."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a call waits for an event loop")


def _waiting(
    method: Callable[Concatenate[AsyncClient, P], Awaitable[T]],
) -> Callable[Concatenate["Client", P], T]:
    """The method of `Client` that returns what one of `AsyncClient` awaits."""

    @wraps(method)
    def call(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        made: T = _returned(method(self.calls, *args, **kwargs))
        return made

    return call


class Client:
    """As `AsyncClient`, without ``await``."""

    def __init__(self, url: str, token: str | None = None, patience: float = 60.0) -> None:
        self.url, self.patience = url, patience
        self.calls = _Blocking(url, token, patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.http.close()

    def events(self, job: str, after: int = 0) -> Iterator[JobEvent]:
        """What happens to a job after the event of that number, until it has ended."""
        events = self.calls.events(job, after)
        with suppress(StopAsyncIteration):
            while True:
                yield _returned(events.__anext__())

    solve = _waiting(AsyncClient.solve)
    submit = _waiting(AsyncClient.submit)
    plan = _waiting(AsyncClient.plan)  # type: ignore[arg-type]
    jobs = _waiting(AsyncClient.jobs)
    job = _waiting(AsyncClient.job)
    wait = _waiting(AsyncClient.wait)
    answer = _waiting(AsyncClient.answer)
    document = _waiting(AsyncClient.document)
    stop = _waiting(AsyncClient.stop)
    retry = _waiting(AsyncClient.retry)
    abort = _waiting(AsyncClient.abort)
