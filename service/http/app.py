"""The application: the page, and jobs submitted, watched, stopped, and their answers read.

A request is validated before it is queued, by the model that users of Python have. Nothing of a
request is opened as a path or imported.
"""

import re
import time
from functools import cache
from importlib.resources import files
from urllib.parse import urlsplit

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import RedirectResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stagewright.executor.drawing.web.render import FOLDER as DRAWING
from stagewright.service import tracing
from stagewright.service.http import downloads, health, jobs, submitting, uploads
from stagewright.service.http.audit import audit_request
from stagewright.service.http.guard import Service, Serving
from stagewright.service.http.identity import Forwarded, Proxies
from stagewright.service.http.openapi import Application, Html
from stagewright.service.http.problems import add_handlers, problem
from stagewright.service.http.tokens import has_token, without_tokens
from stagewright.service.tracing import REQUESTS, note

OWN = "stagewright.service.http.page"
MEDIA_TYPES = {
    "css": "text/css", "html": "text/html", "js": "text/javascript", "json": "application/json",
    "svg": "image/svg+xml",
}  # fmt: skip

router = APIRouter(include_in_schema=False)  # the page holds nothing that needs a token


@router.get("/")
def show_page(service: Serving) -> Response:
    """The page; under a prefix it is also shown without the slash after it."""
    root = service.proxies.root_path
    if root:
        return Html(_content("index.html").replace(b'"page/', f'"{root}/page/'.encode()))
    return _response("index.html")


@router.get("/admin")
def show_administration() -> Response:
    """The page, where administrators see the queue, the workers and the users."""
    return RedirectResponse("./#/admin")


@router.get("/page/{name}")
def read_file(name: str) -> Response:
    """A file that the page loads; its names are those in the two folders alone."""
    return _response(name)


def _response(name: str) -> Response:
    if name not in _folders():
        raise HTTPException(404, f"there is no file {name!r}")
    return Response(_content(name), media_type=MEDIA_TYPES[name.rpartition(".")[2]])


@cache
def _folders() -> dict[str, str]:
    """The folder of each file that browsers load."""
    return {
        one.name: folder
        for folder in (DRAWING, OWN)
        for one in files(folder).iterdir()
        if one.name.rpartition(".")[2] in MEDIA_TYPES
    }


@cache
def _content(name: str) -> bytes:
    return files(_folders()[name]).joinpath(name).read_bytes()


LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE | re.ASCII)
_UNTRACED = ("/health/", "/metrics", "/page/")  # what is asked all the time, and files
_COMPRESSED = 2000  # bytes of an answer, and more
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-store",
}


def create_app(service: Service | None) -> Application:
    """The application on a store; None: only to be described."""
    proxies = Proxies() if service is None else service.proxies
    app = Application(
        title="Stagewright", version="1", openapi_url="/v1/openapi.json", docs_url=None,
        redoc_url=None, generate_unique_id_function=lambda route: route.name,
        telemetry={
            "metrics": False, "logs": False, "operation_spans": False, "auto_configure": False,
            "exclude": lambda scope: _path(scope, proxies.root_path).startswith(_UNTRACED),
        },
        redirect_slashes=False,  # to what a request says that this host is
    )  # fmt: skip
    app.state.service = service
    add_handlers(app)
    app.add_middleware(GZipMiddleware, minimum_size=_COMPRESSED)
    app.add_middleware(_Secured)
    app.add_middleware(_Watched)
    app.add_middleware(Forwarded, proxies=proxies)
    routers = (one.router for one in (submitting, jobs, downloads, uploads))
    for each in (*routers, jobs.administration, health.router, router):
        app.include_router(each)
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
    """Counts, logs and audits every request, by its route and how it was answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        code, began = 500, time.perf_counter()
        if scope["query_string"]:
            tracing.hide_query()
        scope.setdefault("state", {})  # that of copies of the scope, too

        async def send_watched(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                audit_request(scope, code, Headers(raw=message["headers"]))
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        finally:
            seconds, method = time.perf_counter() - began, scope["method"]
            route = getattr(scope.get("route"), "path", "none")
            REQUESTS.labels(method if route != "none" else "any", route, code).observe(seconds)
            note(
                "request", method=method, path=without_tokens(scope["path"]), code=code,
                seconds=round(seconds, 4), address=(scope["client"] or ("",))[0],
            )  # fmt: skip


def _refusal(request: Request) -> str | None:
    """Why a request may not be answered, whoever sends it; None if it may.

    Without tokens, and where a proxy knows who signed in, the browser's place is all that a
    request needs: it may be another site's.
    """
    service, headers = request.app.state.service, request.headers
    if has_token(request.scope["query_string"].decode("latin-1")):
        return "a token is in the URL, which logs keep: revoke it, and send another as a header"
    site, host = headers.get("sec-fetch-site"), headers.get("host", "")
    if site in ("cross-site", "same-site") and not _opens_page(request):
        return "requests of other sites are refused"
    by_place = service.open_to_all or service.proxies.identity_header is not None
    if by_place and site is None and request.method not in ("GET", "HEAD"):
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return "requests of other sites are refused"
    # Not the URL's: where the header makes none, that is the address that the server listens at.
    if service.open_to_all and not _LOCAL.fullmatch(host):
        return f"without tokens this service is at {', '.join(LOOPBACK)} alone"
    return None


def _opens_page(request: Request) -> bool:
    """Whether a link, or the end of signing in elsewhere, shows the page in a tab."""
    path = _path(request.scope, request.scope.get("root_path", ""))
    asked = [request.headers.get(f"sec-fetch-{name}") for name in ("mode", "dest")]
    return request.method == "GET" and path == "/" and asked == ["navigate", "document"]


def _path(scope: Scope, root: str) -> str:
    """The path of a request below the prefix of the proxies, stripped by them or not."""
    path: str = scope["path"]
    return path.removeprefix(root)
