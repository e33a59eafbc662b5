"""Traces: a request, the wait of its job and its run are one trace, over several processes."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from planning_jobs import TWO_JOBS
from processes import PATIENCE
from served import served

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="traces is not installed")

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stagewright.client import Client

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@dataclass
class Collector:
    """What was exported to it, by OTLP over HTTP."""

    url: str
    spans: list[Any] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {
                one.value.string_value
                for one in resource.resource.attributes
                if one.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.spans += scope.spans


@contextmanager
def collecting() -> Iterator[Collector]:
    """A receiver of traces at a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()


def facts(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_job_is_one_trace_from_its_request_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        with served(tmp_path, "--workers", "0") as (front, _), served(tmp_path):
            posted = httpx.post(
                f"{front}/v1/jobshop?priority=0", content=TWO_JOBS, headers=header, timeout=60
            )
            job = posted.json()["id"]
            with Client(front) as client:
                assert client.wait(job, PATIENCE).state == "optimal"
            httpx.get(f"{front}/health/live", timeout=60)
    traced = {one.name: one for one in collector.spans if one.trace_id.hex() == TRACE}
    assert set(traced) == {"POST /v1/jobshop", "queue", "job", "start", "solve"}
    request, run = traced["POST /v1/jobshop"], traced["job"]
    assert request.parent_span_id.hex() == PARENT
    for name, parent in (("queue", request), ("job", request), ("start", run), ("solve", run)):
        assert traced[name].parent_span_id == parent.span_id, name
        told = facts(traced[name])
        assert told["stagewright.job"] == job
        assert (told["stagewright.kind"], told["stagewright.user_class"]) == ("jobshop", "local")
    assert facts(request)["stagewright.job"] == job
    assert facts(request)["url.query"] == "REDACTED"
    assert facts(run)["stagewright.state"] == "optimal"
    order = [traced[name] for name in ("queue", "start", "solve")]
    times = [at for one in order for at in (one.start_time_unix_nano, one.end_time_unix_nano)]
    assert times == sorted(times)
    assert collector.services == {"stagewright"}
    assert not [one.name for one in collector.spans if "/health" in one.name]
    assert "makespan" not in str(collector.spans)  # nothing of requests or answers


UNSENT = (
    ({}, ""),
    ({"OTEL_TRACES_EXPORTER": "none", ENDPOINT: "http://127.0.0.1:9"}, ""),
    ({"OTEL_SDK_DISABLED": "true", ENDPOINT: "http://127.0.0.1:9"}, ""),
    ({"OTEL_TRACES_EXPORTER": "zipkin", ENDPOINT: "http://127.0.0.1:9"}, "no traces are sent"),
    ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", ENDPOINT: "x"}, "there is otlp by http/protobuf"),
)


def test_where_no_traces_are_sent_nothing_is_imported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    code = """if True:
        import json, os, sys
        from stagewright.service import tracing
        for environment in json.loads(sys.argv[1]):
            os.environ |= environment
            tracing.start()
            print("|", file=sys.stderr)
            assert tracing.current() is None
            for name in environment:
                del os.environ[name]
        assert not [one for one in sys.modules if one.startswith("opentelemetry")]
    """
    environments = json.dumps([environment for environment, _ in UNSENT])
    subprocess.run([sys.executable, "-c", code, environments], check=True)
    lines = capfd.readouterr().err.split("|")
    for (_, said), line in zip(UNSENT, lines, strict=False):
        assert said in line
        assert bool(said) == bool(line.strip())
