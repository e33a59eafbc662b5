"""What operators see of a server: its log, figures for Prometheus, traces of OpenTelemetry.

A request, the wait of its job and its run are one trace. Traces are sent where the standard
variables ``OTEL_*`` say, by packages of the extra ``traces``.
Without these variables nothing of them is imported.
"""

import importlib.metadata
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from sqlalchemy import Engine, event

_LOG = logging.getLogger("stagewright.service")
_PREFIX = "stagewright."
_HEADER = "traceparent"  # W3C Trace Context
_tracer: Any = None


def start() -> None:
    """Send the traces of this process, if its environment says where; else say why not."""
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    exporter = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if disabled or exporter == "none" or not any(map(os.environ.get, endpoints)):
        return
    protocols = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(os.environ.get, protocols)), "http/protobuf")
    if (exporter, protocol) != ("otlp", "http/protobuf"):
        _LOG.warning("no traces are sent: %s by %s; there is otlp by http/protobuf", exporter,
            protocol)  # fmt: skip
        return
    try:
        _send()
    except ImportError as error:
        _LOG.warning("no traces are sent without %s: pip install 'stagewright[traces]'", error.name)


def _send() -> None:
    global _tracer
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    version = importlib.metadata.version("stagewright")
    named = Resource({"service.name": "stagewright", "service.version": version})
    provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)  # FastAPI makes the spans of requests by it
    _tracer = trace.get_tracer("stagewright", version)


def current() -> str | None:
    """The traceparent of the span of this thread or task; None without one."""
    if _tracer is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(_HEADER)


def tell(**facts: object) -> None:
    """Add facts, which are ``stagewright.NAME``, to the span of this thread or task."""
    if _tracer is not None:
        from opentelemetry import trace

        trace.get_current_span().set_attributes(_attributes(facts))


def hide_query() -> None:
    """Send no query of the request of this task, which may name addresses that are secret."""
    if _tracer is not None:
        from opentelemetry import trace

        trace.get_current_span().set_attribute("url.query", "REDACTED")


def fail() -> None:
    """Mark the span of this thread as one that has failed."""
    if _tracer is not None:
        from opentelemetry import trace

        trace.get_current_span().set_status(trace.StatusCode.ERROR)


@contextmanager
def span(name: str, parent: str | None, **facts: object) -> Iterator[None]:
    """A span of this thread, below that of a traceparent; None: the first of a trace."""
    if _tracer is None:
        yield
        return
    from opentelemetry.trace import SpanKind

    with _tracer.start_as_current_span(
        name, _below(parent), kind=SpanKind.CONSUMER, attributes=_attributes(facts)
    ):
        yield


def record(name: str, parent: str | None, began: float, ended: float, **facts: object) -> None:
    """A span that has ended, between seconds since 1970."""
    if _tracer is not None:
        given = _attributes(facts)
        made = _tracer.start_span(
            name, _below(parent), attributes=given, start_time=int(began * 1e9)
        )
        made.end(int(max(began, ended) * 1e9))


def _below(parent: str | None) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {} if parent is None else {_HEADER: parent}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())


def _attributes(facts: Mapping[str, object]) -> dict[str, Any]:
    return {_PREFIX + name: value for name, value in facts.items() if value is not None}


LOG = logging.getLogger("stagewright.service")
disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each of them
REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
_LONG = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
_WHOSE = ("kind", "user_class")  # the scope with which a job was submitted, or local
REQUESTS = Histogram(
    "stagewright_request_seconds", "Requests by route.", ("method", "route", "code"),
    registry=REGISTRY,
)  # fmt: skip
WAITS = Histogram(
    "stagewright_job_wait_seconds", "From the queue until a job is begun here.", _WHOSE,
    buckets=_LONG, registry=REGISTRY,
)  # fmt: skip
RUNS = Histogram(
    "stagewright_job_run_seconds", "How long an attempt took here.", _WHOSE,
    buckets=_LONG, registry=REGISTRY,
)  # fmt: skip
JOB_ENDS = Counter(
    "stagewright_jobs_ended", "Jobs whose end was stored here.", ("kind", "state"),
    registry=REGISTRY,
)  # fmt: skip
LOST = Counter(
    "stagewright_workers_lost", "Workers whose silence was found here.", registry=REGISTRY
)
CACHED = Counter(
    "stagewright_cache_hits", "Submissions whose answer was known.", ("kind",), registry=REGISTRY
)
SUBMITTED = Counter("stagewright_submissions", "Jobs submitted here.", ("kind",), registry=REGISTRY)
DELIVERED = Counter(
    "stagewright_webhook_attempts", "Attempts to deliver a webhook here.", ("outcome",),
    registry=REGISTRY,
)  # fmt: skip
STORE = Histogram("stagewright_store_seconds", "Statements of the store.", registry=REGISTRY)


def watch_store(engine: Engine) -> None:
    """Time the statements of a store."""

    @event.listens_for(engine, "before_cursor_execute")
    def before(*given: Any) -> None:
        given[4].began = time.perf_counter()

    @event.listens_for(engine, "after_cursor_execute")
    def after(*given: Any) -> None:
        STORE.observe(time.perf_counter() - given[4].began)


def note(what: str, **fields: object) -> None:
    """Log what happened, with its ids and the trace that it is part of, if there is one."""
    if (parent := current()) is not None:
        fields["trace"] = parent.split("-")[1]
    LOG.info(what, extra={"fields": fields})


class Lines(logging.Formatter):
    """One line each: ``AT LEVEL WHAT NAME=VALUE ...``, or a JSON object."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """See :meth:`logging.Formatter.format`."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told = {"at": at, "level": record.levelname.lower(), "what": record.getMessage()}
        fields: dict[str, object] = getattr(record, "fields", {})
        if record.exc_info:
            fields = fields | {"error": self.formatException(record.exc_info)}
        if self._as_json:
            return json.dumps(told | fields, default=str)
        return " ".join([*told.values(), *(f"{name}={_word(one)}" for name, one in fields.items())])


def _word(value: object) -> str:
    text = str(value)
    is_plain = text and text.isprintable() and not set(text) & set(' "=')
    return text if is_plain else json.dumps(text)


def log(as_json: bool) -> None:
    """Write the lines on stderr, and those of the HTTP server in the same form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(as_json))
    for name in ("stagewright", "uvicorn", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    LOG.setLevel(logging.INFO)
