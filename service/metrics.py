"""What operators see of a server: lines of its log, and figures that Prometheus reads."""

import json
import logging
import sys
import time
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

from stagewright.service import tracing

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
    if (parent := tracing.current()) is not None:
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
