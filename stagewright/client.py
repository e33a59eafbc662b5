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
import math
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter

from stagewright.formulations.forms.answers import OnProgress, Progress, Status, StopToken, silent
from stagewright.formulations.plans.plan import FORMAT, VERSION, PipelinePlan
from stagewright.formulations.plans.plan_class import PlanClass
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.chain import Chain
from stagewright.service.answers import Answer
from stagewright.service.jobs.kinds import kind_of, parse_request
from stagewright.service.jobs.records import ENDED
from stagewright.service.pipelines.requests import PlanRequest
from stagewright.service.requests import Request
from stagewright.service.whole_answers import kept_plan, read

try:
    import httpx
    from httpx_sse import ServerSentEvent, aconnect_sse, connect_sse
except ImportError as error:
    raise InputError(f"the client needs {error.name}: pip install 'stagewright[client]'") from None

POLL_SECONDS = 0.5
LEAVE_SECONDS = 5.0  # for ending a job that is waited for no more
_PATIENCE = httpx.Timeout(30.0)
_AWAY = (502, 503, 504)  # the service, behind a proxy, or its store

_PLANS = TypeAdapter(PlanClass)

T = TypeVar("T")
AnyRequest = Request | Mapping[str, Any] | str
"""A request: the model, its fields as plain data, or those as JSON."""


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


class _Calls:
    """The calls that both clients make: method, path and arguments of httpx."""

    @staticmethod
    def submit(kind: str, request: AnyRequest, key: str | None, priority: int) -> dict[str, Any]:
        headers = {} if key is None else {"Idempotency-Key": key}
        return {
            "method": "POST", "url": f"/v1/{kind}", "content": _content(request),
            "headers": headers, "params": {"priority": priority},
        }  # fmt: skip

    @staticmethod
    def plan(chain: Chain, cluster: Cluster, options: Mapping[str, Any]) -> str:
        """The text of a request for a plan."""
        given = {name: json.loads(documents.to_json(one)) for name, one in (
            ("chain", chain), ("cluster", cluster))}  # fmt: skip
        return json.dumps(given | dict(options))

    @staticmethod
    def events(job: str, after: int) -> dict[str, Any]:
        headers = {"Last-Event-ID": str(after)}
        return {"method": "GET", "url": f"/v1/jobs/{job}/events", "headers": headers}


def _content(request: AnyRequest) -> str:
    if isinstance(request, Request):
        return request.model_dump_json(by_alias=True)
    return request if isinstance(request, str) else json.dumps(request)


def _told(response: httpx.Response) -> httpx.Response:
    """The response, if the service did what was asked."""
    if response.is_success:
        return response
    try:
        detail = str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        detail = f"HTTP {response.status_code} of {response.request.url}"
    raise ServiceError(response.status_code, detail)


def _state(response: httpx.Response) -> JobState:
    return _job(_told(response).json())


def _job(found: Mapping[str, Any]) -> JobState:
    fields = {name: found[name] for name in JobState.__dataclass_fields__}
    told = fields["webhook"]
    return JobState(**fields | {"webhook": None if told is None else Webhook(**told)})


def _plan(response: httpx.Response) -> PipelinePlan:
    return documents.parse(PipelinePlan, _told(response).text, "plan", FORMAT, VERSION)


def _optional(response: httpx.Response) -> str | None:
    """The text of what may not be there."""
    return None if response.status_code == httpx.codes.NOT_FOUND else _told(response).text


def _answer(job: JobState, request: str, answer: str | None, document: str | None) -> Answer:
    asked = parse_request(job.kind, request)
    if answer is not None:
        return read(answer, asked, document)
    if document is None or not isinstance(asked, PlanRequest):
        raise UnansweredError(job)
    by_user = job.stopped_by == "user"
    status = Status.INTERRUPTED if by_user else Status.FEASIBLE
    return kept_plan(asked, document, status, job.reason)


def _has_data(found: ServerSentEvent) -> bool:
    """Whether it is an event; httpx-sse also tells of the comments that keep a connection."""
    return bool(found.data)


def _event(found: ServerSentEvent) -> JobEvent:
    return JobEvent(int(found.id), found.event, found.json())


def _progress(event: JobEvent, began: float) -> Progress:
    bound, plans = event.data["bound"], event.data["plans"]
    return Progress(
        time.monotonic() - began,
        event.data["cost"],
        -math.inf if bound is None else bound,
        plans=None if plans is None else _PLANS.validate_python(plans),
        doing=event.data.get("doing", ""),
    )


def _headers(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


@dataclass
class _Patience:
    """How long a service that does not answer is asked again."""

    seconds: float
    since: float | None = None

    def answered(self) -> None:
        """The service is there."""
        self.since = None

    def require(self, error: Exception) -> None:
        """Raise the error if it is no loss of connection, or has lasted for too long."""
        if isinstance(error, ServiceError) and error.status not in _AWAY:
            raise error
        now = time.monotonic()
        self.since = self.since or now
        if now - self.since > self.seconds:
            raise error


_CUT = (httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError)
_LOST = (httpx.TransportError, ServiceError)
_TOLD = (httpx.TransportError, InputError)  # what the service, or its loss, ends a wait with


def _made(kind: Callable[..., T], url: str, token: str | None) -> T:
    """A client of httpx, which reads the proxies in the environment when it is made."""
    try:
        return kind(base_url=url, headers=_headers(token), timeout=_PATIENCE)
    except ImportError:
        raise InputError(
            f"{url}: the environment names a SOCKS proxy: pip install 'httpx[socks]', "
            "or unset ALL_PROXY"
        ) from None


class Client:
    """The service at ``url``; ``token`` is one that ``stagewright token`` made.

    Every method raises `ServiceError` if the service refuses, and ``httpx.HTTPError`` if it does
    not answer. ``events`` and ``solve`` connect again if a connection is lost, for ``patience``
    seconds.
    """

    def __init__(self, url: str, token: str | None = None, patience: float = 60.0) -> None:
        self.url, self.patience = url, patience
        self._http = _made(httpx.Client, url, token)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def solve(
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
        job as well, but for those of a service that goes away.

        Raises
        ------
        UnansweredError
            If the job ends without an answer.
        LostServiceError
            If the service goes away after it has taken the request.
        """
        job = self._submitted(kind or kind_of(request), request).id
        began = time.monotonic()
        try:
            with self._stopping(job, stop):
                for event in self.events(job):
                    if event.name == "progress":
                        on_progress(_progress(event, began))
            return self._persistent(lambda: self.answer(job))
        except httpx.TransportError:
            raise LostServiceError(self.url, job) from None

    def _submitted(self, kind: str, request: Request) -> JobState:
        """Submit once, however often the connection is lost after the service was there."""
        key = uuid.uuid4().hex
        try:
            return self.submit(kind, request, key=key)
        except _CUT:
            return self._persistent(lambda: self.submit(kind, request, key=key))

    def _persistent(self, call: Callable[[], T]) -> T:
        """What a call returns, which is tried again while the connection is lost."""
        patience = _Patience(self.patience)
        while True:
            try:
                return call()
            except _LOST as error:
                patience.require(error)
                time.sleep(POLL_SECONDS)

    @contextmanager
    def _stopping(self, job: str, stop: StopToken | None) -> Iterator[None]:
        """Stop the job once the token is set while the body runs, or if the body fails."""
        over = threading.Event()
        thread = threading.Thread(target=self._stop_when_set, args=(job, stop, over), daemon=True)
        if stop is not None:
            thread.start()
        try:
            yield
        except _TOLD:
            raise
        except BaseException:
            with suppress(*_LOST):
                _told(self._http.delete(f"/v1/jobs/{job}", timeout=LEAVE_SECONDS))
            raise
        finally:
            over.set()

    def _stop_when_set(self, job: str, stop: StopToken, over: threading.Event) -> None:
        while not over.wait(POLL_SECONDS / 5):
            if stop.is_set():
                with suppress(*_LOST):
                    self.stop(job)
                    return

    def submit(
        self, kind: str, request: AnyRequest, *, key: str | None = None, priority: int = 0
    ) -> JobState:
        """Submit a request of a kind; with a ``key`` it is submitted once, however often."""
        return _state(self._http.request(**_Calls.submit(kind, request, key, priority)))

    def plan(
        self, chain: Chain, cluster: Cluster, *, key: str | None = None, **options: Any
    ) -> JobState:
        """Submit a plan; ``options`` are the other fields of a `PlanRequest`."""
        return self.submit("plan", _Calls.plan(chain, cluster, options), key=key)

    def jobs(self, limit: int = 20) -> list[JobState]:
        """The newest jobs."""
        found = _told(self._http.get("/v1/jobs", params={"limit": limit})).json()
        return [_job(one) for one in found["jobs"]]

    def job(self, job: str) -> JobState:
        """A job."""
        return _state(self._http.get(f"/v1/jobs/{job}"))

    def wait(self, job: str, timeout: float | None = None) -> JobState:
        """A job when it has ended; raises TimeoutError after ``timeout`` seconds."""
        ends = None if timeout is None else time.monotonic() + timeout
        while not (found := self.job(job)).has_ended:
            if ends is not None and time.monotonic() > ends:
                raise TimeoutError(f"job {job} is still {found.state}")
            time.sleep(POLL_SECONDS)
        return found

    def events(self, job: str, after: int = 0) -> Iterator[JobEvent]:
        """What happens to a job after the event of that number, until it has ended."""
        patience = _Patience(self.patience)
        while True:
            try:
                ended = self.job(job).has_ended  # asked first: no event of the end is missed
                with connect_sse(self._http, **_Calls.events(job, after)) as source:
                    patience.answered()
                    for one in filter(_has_data, source.iter_sse()):
                        after = int(one.id)
                        yield _event(one)
            except _LOST as error:
                patience.require(error)
                time.sleep(POLL_SECONDS)
                continue
            if ended:
                return

    def answer(self, job: str) -> Answer:
        """The answer, of the same type as the library's own.

        Raises
        ------
        UnansweredError
            If the job ended without one.
        """
        found = self.job(job)
        request = _told(self._http.get(f"/v1/jobs/{job}/request")).text
        text = _optional(self._http.get(f"/v1/jobs/{job}/answer", params={"whole": True}))
        plan = _optional(self._http.get(f"/v1/jobs/{job}/plan"))
        return _answer(found, request, text, plan)

    def document(self, job: str) -> PipelinePlan:
        """The best plan so far."""
        return _plan(self._http.get(f"/v1/jobs/{job}/plan"))

    def stop(self, job: str) -> JobState:
        """End a job with its best answer so far."""
        return _state(self._http.delete(f"/v1/jobs/{job}"))

    def abort(self, job: str) -> JobState:
        """End a job at once, without an answer."""
        return _state(self._http.post(f"/v1/jobs/{job}/abort"))


class AsyncClient:
    """The same with ``await``."""

    def __init__(self, url: str, token: str | None = None, patience: float = 60.0) -> None:
        self.url, self.patience = url, patience
        self._http = _made(httpx.AsyncClient, url, token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def solve(
        self,
        request: Request,
        on_progress: OnProgress = silent,
        stop: StopToken | None = None,
        kind: str | None = None,
    ) -> Answer:
        """As `Client.solve`; cancelling the task, as ``asyncio.timeout`` does, ends the job."""
        submitted = asyncio.create_task(self._submitted(kind or kind_of(request), request))
        began = time.monotonic()
        async with self._stopping(submitted, stop):
            job = (await asyncio.shield(submitted)).id
            try:
                async for event in self.events(job):
                    if event.name == "progress":
                        on_progress(_progress(event, began))
                return await self._persistent(lambda: self.answer(job))
            except httpx.TransportError:
                raise LostServiceError(self.url, job) from None

    async def _submitted(self, kind: str, request: Request) -> JobState:
        """As `Client._submitted`."""
        key = uuid.uuid4().hex
        try:
            return await self.submit(kind, request, key=key)
        except _CUT:
            return await self._persistent(lambda: self.submit(kind, request, key=key))

    async def _persistent(self, call: Callable[[], Awaitable[T]]) -> T:
        """As `Client._persistent`."""
        patience = _Patience(self.patience)
        while True:
            try:
                return await call()
            except _LOST as error:
                patience.require(error)
                await asyncio.sleep(POLL_SECONDS)

    @asynccontextmanager
    async def _stopping(
        self, submitted: asyncio.Task[JobState], stop: StopToken | None
    ) -> AsyncIterator[None]:
        """As `Client._stopping`; what stops the job is not cancelled with the task."""
        watch = None if stop is None else asyncio.create_task(self._stop_when_set(submitted, stop))
        try:
            yield
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

    async def submit(
        self, kind: str, request: AnyRequest, *, key: str | None = None, priority: int = 0
    ) -> JobState:
        """As `Client.submit`."""
        return _state(await self._http.request(**_Calls.submit(kind, request, key, priority)))

    async def plan(
        self, chain: Chain, cluster: Cluster, *, key: str | None = None, **options: Any
    ) -> JobState:
        """As `Client.plan`."""
        return await self.submit("plan", _Calls.plan(chain, cluster, options), key=key)

    async def jobs(self, limit: int = 20) -> list[JobState]:
        """As `Client.jobs`."""
        found = _told(await self._http.get("/v1/jobs", params={"limit": limit})).json()
        return [_job(one) for one in found["jobs"]]

    async def job(self, job: str) -> JobState:
        """A job."""
        return _state(await self._http.get(f"/v1/jobs/{job}"))

    async def wait(self, job: str) -> JobState:
        """A job when it has ended; bound it by ``asyncio.timeout``."""
        while not (found := await self.job(job)).has_ended:
            await asyncio.sleep(POLL_SECONDS)
        return found

    async def events(self, job: str, after: int = 0) -> AsyncIterator[JobEvent]:
        """As `Client.events`."""
        patience = _Patience(self.patience)
        while True:
            try:
                ended = (await self.job(job)).has_ended
                async with aconnect_sse(self._http, **_Calls.events(job, after)) as source:
                    patience.answered()
                    async for one in source.aiter_sse():
                        if _has_data(one):
                            after = int(one.id)
                            yield _event(one)
            except _LOST as error:
                patience.require(error)
                await asyncio.sleep(POLL_SECONDS)
                continue
            if ended:
                return

    async def answer(self, job: str) -> Answer:
        """As `Client.answer`."""
        found = await self.job(job)
        request = _told(await self._http.get(f"/v1/jobs/{job}/request")).text
        whole = {"whole": True}
        text = _optional(await self._http.get(f"/v1/jobs/{job}/answer", params=whole))
        plan = _optional(await self._http.get(f"/v1/jobs/{job}/plan"))
        return _answer(found, request, text, plan)

    async def document(self, job: str) -> PipelinePlan:
        """The best plan so far."""
        return _plan(await self._http.get(f"/v1/jobs/{job}/plan"))

    async def stop(self, job: str) -> JobState:
        """End a job with its best answer so far."""
        return _state(await self._http.delete(f"/v1/jobs/{job}"))

    async def abort(self, job: str) -> JobState:
        """End a job at once, without an answer."""
        return _state(await self._http.post(f"/v1/jobs/{job}/abort"))
