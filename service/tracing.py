"""Traces of OpenTelemetry: a request, the wait of its job and its run, as one trace.

They are sent where the standard variables ``OTEL_*`` say, by packages of the extra ``traces``.
Without these variables nothing of them is imported.
"""

import importlib.metadata
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
