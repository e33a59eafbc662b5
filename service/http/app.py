"""The application: jobs of every kind submitted, watched, stopped, and their answers read.

A request is validated before it is queued, by the model that users of Python have. Nothing of a
request is opened as a path or imported.
"""

import re
import time

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stagewright.service.http import downloads, jobs, pages, submitting, uploads
from stagewright.service.http.guard import Service
from stagewright.service.http.openapi import Application
from stagewright.service.http.problems import add_handlers, problem
from stagewright.service.metrics import REQUESTS, note

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE | re.ASCII)
_COMPRESSED = 2000  # bytes of an answer, and more
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-store",
}


def create_app(service: Service) -> Application:
    """The application on a store."""
    app = Application(
        title="Stagewright", version="1", openapi_url="/v1/openapi.json", docs_url=None,
        redoc_url=None, generate_unique_id_function=lambda route: route.name,
    )  # fmt: skip
    app.state.service = service
    add_handlers(app)
    app.add_middleware(GZipMiddleware, minimum_size=_COMPRESSED)
    app.add_middleware(_Secured)
    app.add_middleware(_Watched)
    for module in (submitting, jobs, downloads, uploads):
        app.include_router(module.router)
    app.include_router(pages.health)
    app.include_router(pages.router)
    return app


class _Secured:
    """Refuses requests of other sites, and closes every response by headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the application, or refuse it."""

        async def send_closed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = _refusal(Request(scope))
        answer = self._app if refusal is None else problem(403, refusal)
        if scope["method"] == "HEAD" and not scope["path"].endswith("/events"):
            scope = {**scope, "method": "GET"}  # the server sends no body
        await answer(scope, receive, send_closed)


class _Watched:
    """Counts and logs every request, by its route and how it was answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        code, began = 500, time.perf_counter()

        async def send_watched(message: Message) -> None:
            nonlocal code
            code = message.get("status", code)
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        finally:
            seconds, method = time.perf_counter() - began, scope["method"]
            route = getattr(scope.get("route"), "path", "none")
            REQUESTS.labels(method if route != "none" else "any", route, code).observe(seconds)
            note(
                "request", method=method, path=scope["path"], code=code,
                seconds=round(seconds, 4), address=(scope["client"] or ("",))[0],
            )  # fmt: skip


def _refusal(request: Request) -> str | None:
    """Why a request may be another site's, which uses a browser of this machine; None if not.

    Without tokens the browser's place is all that a request needs.
    """
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        return "requests of other sites are refused"
    # Not the URL's: where the header makes none, that is the address that the server listens at.
    host = request.headers.get("host", "")
    if request.app.state.service.open_to_all and not _LOCAL.fullmatch(host):
        return f"without tokens this service is at {', '.join(LOOPBACK)} alone, not at {host}"
    return None
