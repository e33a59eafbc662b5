"""The service as people run it: the command, in a process of its own, and a proxy before it."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from processes import PATIENCE


@contextmanager
def served(
    folder: Path, *options: str, number: int = signal.SIGINT
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server at a free port, in a process of its own; its address."""
    command = [sys.executable, "-m", "stagewright", "serve", "--port", "0", *options]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        told = re.fullmatch(r"serving at (http://\S+)\n", process.stdout.readline())
        assert told is not None
        try:
            yield told[1], process
        finally:
            process.send_signal(number)
            process.wait(PATIENCE)


@contextmanager
def listening(app: Any, **settings: Any) -> Iterator[int]:
    """The port at which a thread serves an application by uvicorn."""
    import uvicorn

    ends = {"log_level": "critical", "timeout_graceful_shutdown": 1}  # of streams, too
    server = uvicorn.Server(uvicorn.Config(app, **ends, **settings))
    bound = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


@contextmanager
def behind(port: int, prefix: str, names: dict[str, str]) -> Iterator[str]:
    """A proxy that strips a prefix and sets these headers; the address of the prefix."""

    class Proxy(BaseHTTPRequestHandler):
        """Passes requests under the prefix on, and their answers back as they arrive."""

        def do_GET(self) -> None:
            if not self.path.startswith(f"{prefix}/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            there = HTTPConnection("127.0.0.1", port)
            headers = dict(self.headers) | names
            there.request(self.command, self.path.removeprefix(prefix), body, headers)
            answer = there.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):
                while part := answer.read1():
                    self.wfile.write(part)

        do_POST = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{prefix}"
        finally:
            server.shutdown()
            thread.join(PATIENCE)
