"""Who calls a route, what the caller may do, and which jobs are the caller's."""

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from stagewright.service.http.limits import RequestLimits, RequestRate
from stagewright.service.http.tokens import Caller, Scope, Tokens
from stagewright.service.http.webhooks import Webhooks
from stagewright.service.jobs.records import ServiceJob, State
from stagewright.service.jobs.store import ServiceStore

ID = "[0-9a-f]{32}"  # of a job; databases refuse some texts
LOCAL = Caller("local", Scope.ADMIN)
_ID = re.compile(ID)
_BEARER = HTTPBearer(auto_error=False)


@dataclass(frozen=True, slots=True)
class Service:
    """The store and the settings that all routes use.

    ``open_to_all``: for one machine alone, and without tokens until the first is made. ``rate``
    limits the requests of each user, and those without a valid token of each address. ``webhooks``
    None: none are sent. ``streams`` of events are read now, by user.
    """

    store: ServiceStore
    limits: RequestLimits = field(default_factory=RequestLimits)
    open_to_all: bool = False
    rate: RequestRate | None = None
    webhooks: Webhooks | None = None
    streams: Counter[str] = field(default_factory=Counter)
    _closed: threading.Event = field(default_factory=threading.Event)

    def needs_token(self) -> bool:
        """Whether callers need one; that stays so when all are revoked."""
        if self.open_to_all and not self._closed.is_set() and Tokens(self.store.engine).exist():
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
        found = _known(service, None if given is None else given.credentials)
        if found is None:
            service.take(f"address {request.client and request.client.host}")
            raise HTTPException(
                401,
                "a token is needed: Authorization: Bearer TOKEN"
                if given is None
                else "this token is unknown, or was revoked",
                {"WWW-Authenticate": "Bearer"},
            )
        service.take(f"user {found.user}")
        if not found.may(scope):
            raise HTTPException(403, f"this token may not: it needs the scope {scope.value}")
        return found

    return caller


def _known(service: Service, token: str | None) -> Caller | None:
    if not service.needs_token():
        return LOCAL
    return None if token is None else Tokens(service.store.engine).caller(token)


Reader = Annotated[Caller, Depends(_allowed(Scope.READ))]
Submitter = Annotated[Caller, Depends(_allowed(Scope.SUBMIT))]


def own_job(job: str, caller: Caller, service: Service) -> ServiceJob:
    """The caller's own job of that whole id; an administrator's is any."""
    whose = None if caller.may(Scope.ADMIN) else caller.user
    found = service.store.get(job, whose) if _ID.fullmatch(job) else None
    if found is None:
        raise HTTPException(404, f"there is no job {job!r}")
    return found


def _readable(job: str, caller: Reader, service: Serving) -> ServiceJob:
    return own_job(job, caller, service)


def _changeable(job: str, caller: Submitter, service: Serving) -> ServiceJob:
    return own_job(job, caller, service)


Readable = Annotated[ServiceJob, Depends(_readable)]
Changeable = Annotated[ServiceJob, Depends(_changeable)]
