"""Routes of the service's health, and its metrics as Prometheus reads them."""

import importlib.metadata
import shutil
from pathlib import Path

from fastapi import APIRouter, HTTPException, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from sqlalchemy.exc import SQLAlchemyError

from stagewright.service.http.guard import Reader, Service, Serving
from stagewright.service.http.openapi import GUARDED, refused, response_of
from stagewright.service.jobs.kinds import KINDS
from stagewright.service.jobs.overview import (
    deliveries_by_state,
    running_by_kind,
    waiting_by_kind,
    workers_of,
)
from stagewright.service.jobs.records import DeliveryState, State
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.tracing import REGISTRY
from stagewright.service.workers.worker import SILENT_SECONDS

router = APIRouter(responses=refused(403))
Metrics = response_of("Metrics", CONTENT_TYPE_LATEST)


@router.get("/health/live", responses=refused(503))
async def live(service: Serving) -> dict[str, str]:
    """The process answers and its workers go on, even when all its threads wait for the store."""
    if (silent := service.silent()) > SILENT_SECONDS:
        told = f"a worker of this server hangs: silent for {silent:.0f} s"
        raise HTTPException(503, told, {"Retry-After": "60"})
    return {"status": "live"}


@router.get("/health/ready", responses=refused(503))
def ready(service: Serving) -> dict[str, str]:
    """The store takes what is submitted, too."""
    service.store.ping()
    return {"status": "ready"}


@router.get("/metrics", response_class=Metrics, responses=refused(*GUARDED))
def metrics(caller: Reader, service: Serving) -> Response:
    """The queue, jobs, workers and webhooks of the store; what this server has done."""
    registry = CollectorRegistry()
    _of_server(registry, service)
    _of_jobs(registry, service.store)
    return Metrics(generate_latest(registry) + generate_latest(REGISTRY))


def _gauge(
    registry: CollectorRegistry, name: str, told: str, values: dict[str, float], label: str
) -> None:
    gauge = Gauge(f"stagewright_{name}", told, [label], registry=registry)
    for value, amount in values.items():
        gauge.labels(value).set(amount)


def _of_server(registry: CollectorRegistry, service: Service) -> None:
    def gauge(name: str, told: str, value: float) -> None:
        Gauge(f"stagewright_{name}", told, registry=registry).set(value)

    version = {importlib.metadata.version("stagewright"): 1.0}
    _gauge(registry, "build_info", "The version of this server.", version, "version")
    gauge("open_streams", "Streams of events read now from here.", service.streams.total())
    gauge("store_writable", "Whether the store takes what is submitted.", _takes(service.store))
    database = service.store.engine.url.database
    if service.store.engine.dialect.name == "sqlite" and database and Path(database).exists():
        free = shutil.disk_usage(database).free
        gauge("store_free_bytes", "Free on the disk of a store of SQLite.", free)


def _takes(store: ServiceStore) -> bool:
    try:
        store.ping()
    except SQLAlchemyError:
        return False
    return True


def _of_jobs(registry: CollectorRegistry, store: ServiceStore) -> None:
    counts, waiting, running = store.counts(), waiting_by_kind(store), running_by_kind(store)
    workers, told = workers_of(store), deliveries_by_state(store)
    none = (0, 0.0)
    for name, what, label, values in (
        ("jobs", "Jobs by state.", "state", {one.value: counts.get(one, 0) for one in State}),
        ("queue_jobs", "Jobs that wait.", "kind",
            {kind: waiting.get(kind, none)[0] for kind in KINDS}),
        ("queue_age_seconds", "How long the oldest has waited.", "kind",
            {kind: waiting.get(kind, none)[1] for kind in KINDS}),
        ("running_jobs", "Jobs that run.", "kind", {kind: running.get(kind, 0) for kind in KINDS}),
        ("workers", "Workers that are alive.", "state", {
            "busy": sum(one.alive and one.job is not None for one in workers),
            "idle": sum(one.alive and one.job is None for one in workers),
        }),
        ("webhooks", "Webhooks of jobs that are kept.", "state",
            {one.value: told.get(one, 0) for one in DeliveryState}),
    ):  # fmt: skip
        _gauge(registry, name, what, {key: float(value) for key, value in values.items()}, label)
