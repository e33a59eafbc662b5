"""A client of the planning service.

Examples
--------
>>> from stagewright.client import Client
>>> with Client("http://127.0.0.1:8754") as client:  # doctest: +SKIP
...     job = client.plan(chain, cluster, microbatches=8, time_limit=60)
...     for event in client.events(job.id):
...         print(event.name, event.data)
...     plan = client.document(job.id)
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from stagewright.formulations.plans.plan import FORMAT, VERSION, PipelinePlan
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.chain import Chain
from stagewright.service.jobs.records import ENDED

try:
    import httpx
except ImportError:
    raise InputError("the client needs httpx: pip install 'stagewright[client]'") from None

POLL_SECONDS = 0.5
_PATIENCE = httpx.Timeout(30.0)


@dataclass(frozen=True, slots=True)
class JobState:
    """A job as the service tells of it; see `stagewright.service.http.views.JobView`."""

    id: str
    kind: str
    state: str
    cost: float | None
    bound: float | None
    gap: float | None
    stopped_by: str | None
    reason: str
    has_document: bool

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


class _Calls:
    """The calls that both clients make: method, path and arguments of httpx."""

    @staticmethod
    def submit(
        kind: str, request: Mapping[str, Any] | str, key: str | None, priority: int
    ) -> dict[str, Any]:
        content = request if isinstance(request, str) else json.dumps(request)
        headers = {} if key is None else {"Idempotency-Key": key}
        return {
            "method": "POST", "url": f"/v1/{kind}", "content": content, "headers": headers,
            "params": {"priority": priority},
        }  # fmt: skip

    @staticmethod
    def plan(chain: Chain, cluster: Cluster, options: Mapping[str, Any]) -> str:
        """The text of a request for a plan."""
        given = {name: json.loads(documents.to_json(one)) for name, one in (
            ("chain", chain), ("cluster", cluster))}  # fmt: skip
        return json.dumps(given | dict(options))


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
    found = _told(response).json()
    return JobState(**{name: found[name] for name in JobState.__dataclass_fields__})


def _plan(response: httpx.Response) -> PipelinePlan:
    return documents.parse(PipelinePlan, _told(response).text, "plan", FORMAT, VERSION)


def _event(found: Mapping[str, Any]) -> JobEvent:
    return JobEvent(found["number"], found["name"], found["data"])


def _headers(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


class Client:
    """The service at ``url``; ``token`` is one that ``stagewright token`` made.

    Every method raises `ServiceError` if the service refuses, and ``httpx.HTTPError`` if it does
    not answer.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self._http = httpx.Client(base_url=url, headers=_headers(token), timeout=_PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def submit(
        self,
        kind: str,
        request: Mapping[str, Any] | str,
        *,
        key: str | None = None,
        priority: int = 0,
    ) -> JobState:
        """Submit a request of a kind; with a ``key`` it is submitted once, however often."""
        return _state(self._http.request(**_Calls.submit(kind, request, key, priority)))

    def plan(
        self, chain: Chain, cluster: Cluster, *, key: str | None = None, **options: Any
    ) -> JobState:
        """Submit a plan; ``options`` are the other fields of a `PlanRequest`."""
        return self.submit("plan", _Calls.plan(chain, cluster, options), key=key)

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
        """What happens to a job, until it has ended."""
        while True:
            ended = self.job(job).has_ended  # asked first, so that no event of the end is missed
            history = self._http.get(f"/v1/jobs/{job}/history", params={"after": after})
            for one in _told(history).json():
                after = one["number"]
                yield _event(one)
            if ended:
                return
            time.sleep(POLL_SECONDS)

    def answer(self, job: str) -> dict[str, Any]:
        """The answer, as ``--json`` prints it."""
        found: dict[str, Any] = _told(self._http.get(f"/v1/jobs/{job}/answer")).json()
        return found

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

    def __init__(self, url: str, token: str | None = None) -> None:
        self._http = httpx.AsyncClient(base_url=url, headers=_headers(token), timeout=_PATIENCE)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def submit(
        self,
        kind: str,
        request: Mapping[str, Any] | str,
        *,
        key: str | None = None,
        priority: int = 0,
    ) -> JobState:
        """As `Client.submit`."""
        return _state(await self._http.request(**_Calls.submit(kind, request, key, priority)))

    async def plan(
        self, chain: Chain, cluster: Cluster, *, key: str | None = None, **options: Any
    ) -> JobState:
        """As `Client.plan`."""
        return await self.submit("plan", _Calls.plan(chain, cluster, options), key=key)

    async def job(self, job: str) -> JobState:
        """A job."""
        return _state(await self._http.get(f"/v1/jobs/{job}"))

    async def wait(self, job: str) -> JobState:
        """A job when it has ended; bound it by ``asyncio.timeout``."""
        while not (found := await self.job(job)).has_ended:
            await asyncio.sleep(POLL_SECONDS)
        return found

    async def events(self, job: str, after: int = 0) -> AsyncIterator[JobEvent]:
        """What happens to a job, until it has ended."""
        while True:
            ended = (await self.job(job)).has_ended
            history = await self._http.get(f"/v1/jobs/{job}/history", params={"after": after})
            for one in _told(history).json():
                after = one["number"]
                yield _event(one)
            if ended:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def answer(self, job: str) -> dict[str, Any]:
        """The answer, as ``--json`` prints it."""
        found: dict[str, Any] = _told(await self._http.get(f"/v1/jobs/{job}/answer")).json()
        return found

    async def document(self, job: str) -> PipelinePlan:
        """The best plan so far."""
        return _plan(await self._http.get(f"/v1/jobs/{job}/plan"))

    async def stop(self, job: str) -> JobState:
        """End a job with its best answer so far."""
        return _state(await self._http.delete(f"/v1/jobs/{job}"))

    async def abort(self, job: str) -> JobState:
        """End a job at once, without an answer."""
        return _state(await self._http.post(f"/v1/jobs/{job}/abort"))
