"""Routes of the page that browsers show, and of the service's health and metrics."""

from functools import cache
from importlib.resources import files

from fastapi import APIRouter, HTTPException, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from stagewright.executor.drawing.web.render import FOLDER as DRAWING
from stagewright.service.http.guard import Reader, Serving
from stagewright.service.http.openapi import GUARDED, Html, refused, response_of
from stagewright.service.jobs.records import State
from stagewright.service.metrics import REGISTRY

OWN = "stagewright.service.http.page"
MEDIA_TYPES = {
    "css": "text/css", "html": "text/html", "js": "text/javascript", "json": "application/json",
    "svg": "image/svg+xml",
}  # fmt: skip

router = APIRouter(include_in_schema=False)  # the page holds nothing that needs a token
health = APIRouter(responses=refused(403))
Metrics = response_of("Metrics", CONTENT_TYPE_LATEST)  # as Prometheus reads them


@router.get("/")
def show_page(service: Serving) -> Response:
    """The page; under a prefix it is also shown without the slash after it."""
    root = service.proxies.root_path
    if root:
        return Html(_content("index.html").replace(b'"page/', f'"{root}/page/'.encode()))
    return _response("index.html")


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


@health.get("/health/live")
async def live() -> dict[str, str]:
    """The process answers, even when all its threads wait for the store."""
    return {"status": "live"}


@health.get("/health/ready", responses=refused(503))
def ready(service: Serving) -> dict[str, str]:
    """The store takes what is submitted, too."""
    service.store.ping()
    return {"status": "ready"}


@health.get("/metrics", response_class=Metrics, responses=refused(*GUARDED))
def metrics(caller: Reader, service: Serving) -> Response:
    """Jobs by state and the oldest that waits; requests, waits and runs of this server."""
    registry = CollectorRegistry()
    gauge = Gauge("stagewright_jobs", "Jobs by state.", ["state"], registry=registry)
    counts = service.store.counts()
    for state in State:
        gauge.labels(state.value).set(counts.get(state, 0))
    oldest = Gauge("stagewright_queue_age_seconds", "Of the oldest that waits.", registry=registry)
    oldest.set(service.store.queue_age())
    return Metrics(generate_latest(registry) + generate_latest(REGISTRY))
