"""Routes for those who run the service: liveness, readiness, metrics."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from stagewright.service.http.guard import Reader, Serving
from stagewright.service.http.openapi import GUARDED, refused
from stagewright.service.jobs.records import State

router = APIRouter(responses=refused(403))


class Metrics(Response):
    """Metrics as Prometheus reads them."""

    media_type = CONTENT_TYPE_LATEST


@router.get("/health/live")
async def live() -> dict[str, str]:
    """The process answers, even when all its threads wait for the store."""
    return {"status": "live"}


@router.get("/health/ready", responses=refused(503))
def ready(service: Serving) -> dict[str, str]:
    """The store answers too."""
    service.store.ping()
    return {"status": "ready"}


@router.get("/metrics", response_class=Metrics, responses=refused(*GUARDED))
def metrics(caller: Reader, service: Serving) -> Response:
    """Jobs by state, for Prometheus."""
    registry = CollectorRegistry()
    gauge = Gauge("stagewright_jobs", "Jobs by state.", ["state"], registry=registry)
    counts = service.store.counts()
    for state in State:
        gauge.labels(state.value).set(counts.get(state, 0))
    return Metrics(generate_latest(registry))
