"""Who calls a route, what the caller may do, and which jobs are the caller's."""

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeGuard

from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from stagewright.service.http.identity import LOCAL, Proxies, site_of, unknown
from stagewright.service.http.limits import RequestLimits, RequestRate, TooManyError
from stagewright.service.http.tokens import PREFIX, Caller, Scope, Tokens, id_of
from stagewright.service.http.webhooks import Webhooks
from stagewright.service.jobs.records import ServiceJob, State
from stagewright.service.jobs.store import ServiceStore

ID = "[0-9a-f]{32}"  # of a job; databases refuse some texts
_ID = re.compile(ID)
_BEARER = HTTPBearer(
    auto_error=False, scheme_name="Token", bearerFormat=f"{PREFIX}...",
    description="A token that `stagewright token USER` makes.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Service:
    """The store and the settings that all routes use.

    ``open_to_all``: for one machine alone, and without tokens until the first is made. ``rate``
    limits the requests of each user, and those without a valid token of each address. ``webhooks``
    None: none are sent. ``proxies`` are those that are trusted. ``streams`` of events are read now,
    by user, and ``looks`` are those at the events of a job after a number that go on now, with
    their beginnings. ``silent``: for how many seconds one of this server's workers has not been
    seen to go on.
    """

    store: ServiceStore
    limits: RequestLimits = field(default_factory=RequestLimits)
    open_to_all: bool = False
    rate: RequestRate | None = None
    webhooks: Webhooks | None = None
    proxies: Proxies = field(default_factory=Proxies)
    tokens: Tokens = field(init=False)
    streams: Counter[str] = field(default_factory=Counter)
    looks: dict[tuple[str, int], tuple[float, asyncio.Task[Any]]] = field(default_factory=dict)
    silent: Callable[[], float] = float
    _closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", Tokens(self.store.engine, self.store.clock))

    def needs_token(self) -> bool:
        """Whether callers need one; that stays so when all are revoked."""
        if self.open_to_all and not self._closed.is_set() and self.tokens.exist():
            self._closed.set()
        return not self.open_to_all or self._closed.is_set()

    def waits(self, jobs: Sequence[ServiceJob]) -> dict[str, str]:
        """Why each of the jobs that is queued waits, by their ids."""
        if not any(one.state is State.QUEUED for one in jobs):
            return {}
        return self.store.standing(jobs, self.limits.running)

    def take(self, who: str) -> None:
        """Count a request; raises TooManyError if there are too many."""
        if self.rate is not None:
            self.rate.take(who)

    def still_admits(self, caller: Caller) -> bool:
        """Whether a caller who was answered before would be now, within `SEEN_SECONDS`."""
        if caller.token is not None:
            return self.tokens.is_valid(caller.token)
        return caller.user != LOCAL.user or not self.needs_token()

    def caller(self, request: Request, token: str | None) -> Caller:
        """Who sends a request.

        One without a valid token counts for its address before the store is asked; where these are
        too many, a token is looked up only if it is one of those that were valid a moment ago.

        Raises
        ------
        HTTPException
            If it is nobody who may be answered.
        TooManyError
            If there are too many of them.
        """
        if not self.needs_token():
            return LOCAL
        site = f"address {site_of(request)}"
        request.state.token = id_of(token) if _is_own(token) else None
        try:
            if len(request.headers.getlist("authorization")) > 1:
                raise unknown("there are several Authorization headers")
            # Who sends a token of the service means it; a proxy names everybody.
            named = None if _is_own(token) else self.proxies.caller(request)
        except HTTPException:
            self.take(site)
            raise
        return named or self._of_token(site, token)

    def _of_token(self, site: str, token: str | None) -> Caller:
        counted = True
        try:
            self.take(site)
        except TooManyError:
            if token is None or not self.tokens.is_valid(id_of(token)):
                raise
            counted = False
        found = None if token is None else self.tokens.caller(token)
        if found is None:
            raise unknown(
                "a token is needed: Authorization: Bearer TOKEN"
                if token is None
                else "this token is unknown, has expired, or was revoked"
            )
        if counted and self.rate is not None:
            self.rate.give_back(site)
        return found


def _is_own(token: str | None) -> TypeGuard[str]:
    return token is not None and token.startswith(PREFIX)


async def _service(request: Request) -> Service:  # else it is called in a thread
    found: Service = request.app.state.service
    return found


Serving = Annotated[Service, Depends(_service)]


def _allowed(scope: Scope) -> Callable[..., Caller]:
    def caller(
        request: Request,
        service: Serving,
        given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)],
    ) -> Caller:
        found = service.caller(request, None if given is None else given.credentials)
        found = replace(found, owners=set())  # LOCAL is the caller of many requests
        request.state.caller = found
        service.take(f"user {found.user}")
        if not found.may(scope):
            raise HTTPException(403, f"you may not: this needs the scope {scope.value}")
        return found

    return caller


Reader = Annotated[Caller, Depends(_allowed(Scope.READ))]
Submitter = Annotated[Caller, Depends(_allowed(Scope.SUBMIT))]
Administrator = Annotated[Caller, Depends(_allowed(Scope.ADMIN))]


def own_job(job: str, caller: Caller, service: Service) -> ServiceJob:
    """The caller's own job of that whole id; an administrator's is any."""
    whose = None if caller.may(Scope.ADMIN) else caller.user
    found = service.store.get(job, whose) if _ID.fullmatch(job) else None
    if found is None:
        raise HTTPException(404, f"there is no job {job!r}")
    caller.owners.add(found.user)
    return found


def _readable(job: str, caller: Reader, service: Serving) -> ServiceJob:
    return own_job(job, caller, service)


def _changeable(job: str, caller: Submitter, service: Serving) -> ServiceJob:
    return own_job(job, caller, service)


Readable = Annotated[ServiceJob, Depends(_readable)]
Changeable = Annotated[ServiceJob, Depends(_changeable)]
