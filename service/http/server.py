"""The server: the application, and workers in threads that answer its jobs in processes."""

import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from stagewright.graphs.documents.errors import InputError
from stagewright.service.http.app import LOOPBACK, create_app
from stagewright.service.http.guard import Service
from stagewright.service.http.limits import RequestLimits
from stagewright.service.http.tokens import Tokens
from stagewright.service.jobs.store import Store
from stagewright.service.workers.processes import LocalProcess, Start
from stagewright.service.workers.worker import Limits, Worker


@dataclass
class Server:
    """A server on a store, with so many workers of its own; ``start`` says where jobs are solved.

    Anything but processes of this machine is a Ray cluster.
    """

    store: Store
    host: str
    port: int
    workers: int
    memory_bytes: float
    start: Start = LocalProcess

    def require_safe(self) -> None:
        """Refuse to serve others without tokens."""
        if self.host not in LOOPBACK and not Tokens(self.store.engine).exist():
            raise InputError(
                f"--host {self.host} is open to others, and there is no token: make one first, "
                "stagewright token USER"
            )

    def run(self, on_start: Callable[[str], None] = lambda _: None) -> None:
        """Serve until a signal, ``on_start`` is told the address; running jobs then end."""
        listening = self._bound()
        free = not Tokens(self.store.engine).exist()
        limits = RequestLimits(ray=self.start is not LocalProcess)
        app = create_app(Service(self.store, limits, open_to_all=free))
        made = [
            Worker(self.store, Limits(memory_bytes=self.memory_bytes), start=self.start)
            for _ in range(self.workers)
        ]
        threads = [threading.Thread(target=one.run) for one in made]
        for thread in threads:
            thread.start()
        on_start(f"http://{self.host}:{listening.getsockname()[1]}")
        config = uvicorn.Config(
            app, log_level="warning", ws="none", server_header=False, timeout_graceful_shutdown=5
        )
        # uvicorn raises the signal that ended it once more, when it has shut down.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except KeyboardInterrupt:
            pass
        finally:
            for one in made:
                one.stop()
            for thread in threads:
                thread.join()

    def _bound(self) -> socket.socket:
        """A socket that listens at the address."""
        try:
            return socket.create_server((self.host, self.port), backlog=1024)
        except OSError as error:
            raise InputError(
                f"--host {self.host} --port {self.port}: {error.strerror or error}"
            ) from None
