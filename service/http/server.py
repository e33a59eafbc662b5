"""The server: the application, and workers in threads that answer its jobs in processes."""

import asyncio
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from stagewright.graphs.documents.errors import InputError
from stagewright.service.http.app import LOOPBACK, create_app
from stagewright.service.http.guard import Service
from stagewright.service.http.identity import Proxies
from stagewright.service.http.limits import RequestLimits, RequestRate
from stagewright.service.http.tokens import Tokens
from stagewright.service.http.webhooks import POLL_SECONDS, Deliverer, Webhooks
from stagewright.service.jobs.queue import QueueRules
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.jobs.upkeep import RepeatedStep, retention
from stagewright.service.tracing import LOG
from stagewright.service.workers.processes import LocalProcess, Start
from stagewright.service.workers.worker import SILENT_SECONDS, JobLimits, Worker

_PER_SECOND = 50.0  # requests of each user
_BURST_SECONDS = 10.0  # how long a user may have asked for nothing, to ask for all of it at once
_MOST_LOOKS = 5  # a minute apart, at a worker that hangs: probes are sooner
_DELIVERERS = 4  # deliveries of webhooks at a time
_MOST_QUEUED = 1000  # jobs of each user
_MOST_STREAMS = 200  # of events that each user reads
HEADER_SECONDS = 10.0  # for the headers of a request to arrive, from its first byte
BACKLOG = 128  # connections that are taken before the first of them is looked at
_OTHER_FILES = 4 * BACKLOG  # taken and not looked at; of the store, and the processes of jobs
_MOST_FILES = 65_536


@dataclass
class Server:
    """A server on a store, with so many workers of its own; ``start`` says where jobs are solved.

    Anything but processes of this machine is a Ray cluster. ``per_second`` limits the requests of
    each user; None: to `_PER_SECOND` where there are tokens. Jobs are deleted ``keep_days`` after
    their ends; None: never. Jobs that run at SIGTERM have ``drain_seconds`` to end. A user may have
    ``queued`` jobs in the queue (None: `_MOST_QUEUED` where there are tokens), whose time limits
    are ``queued_seconds`` together.
    """

    store: ServiceStore
    host: str
    port: int
    workers: int
    memory_bytes: float
    per_second: float | None = None
    webhooks: Webhooks | None = None
    start: Start = LocalProcess
    keep_days: float | None = None
    drain_seconds: float = 25.0
    proxies: Proxies = field(default_factory=Proxies)
    queued: int | None = None
    queued_seconds: float | None = None
    rules: QueueRules = field(default_factory=QueueRules)

    def require_safe(self) -> None:
        """Refuse to serve others without tokens."""
        if self.host not in LOOPBACK and self._is_free():
            raise InputError(
                f"--host {self.host} is open to others, and there is no token: make one first, "
                "stagewright token USER, or name the header of a proxy, --identity-header"
            )

    def _is_free(self) -> bool:
        """Whether nobody needs to be known."""
        return self.proxies.identity_header is None and not Tokens(self.store.engine).exist()

    def run(self, on_start: Callable[[str], None] = lambda _: None) -> None:
        """Serve until a signal, ``on_start`` is told the address.

        At SIGTERM no further job is begun, and those that have not ended in time are queued again;
        at SIGINT, and at a further signal, all are at once.
        """
        listening = self._bound()
        made = [
            Worker(
                self.store, JobLimits(memory_bytes=self.memory_bytes), self.rules, start=self.start
            )
            for _ in range(self.workers)
        ]
        app = create_app(self._service(lambda: _silent(made)))
        beside = [*self._beside(), RepeatedStep(_Watch(made).look, SILENT_SECONDS)]
        runs = [one.run for one in made] + [one.run for one in beside]
        threads = [threading.Thread(target=run) for run in runs]
        for thread in threads:
            thread.start()
        on_start(f"http://{self.host}:{listening.getsockname()[1]}")
        config = uvicorn.Config(
            app, http=connections(), backlog=BACKLOG, log_level="warning", ws="none",
            server_header=False, timeout_graceful_shutdown=5, proxy_headers=False,
        )  # fmt: skip
        # uvicorn raises the signal that ended it once more, when it has shut down.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            _Draining(config, lambda number: self._drain(made, number)).run(sockets=[listening])
        except KeyboardInterrupt:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda number, _: self._drain(made, number))
        finally:
            for one in made:
                if not one.stopping.is_set():
                    one.stop()
            for step in beside:
                step.stop()
            for thread in threads:
                thread.join()

    def _drain(self, workers: Sequence[Worker], number: int) -> None:
        """Stop the workers at a signal of that number."""
        again = any(one.stopping.is_set() for one in workers)
        for one in workers:
            one.stop(0.0 if again or number == signal.SIGINT else self.drain_seconds)

    def _beside(self) -> Iterator[RepeatedStep]:
        """Steps that the server repeats: deliveries of webhooks, and the deletion of old jobs."""
        if self.webhooks is not None:
            deliverer = Deliverer(self.store, self.webhooks)
            for _ in range(_DELIVERERS):
                yield RepeatedStep(deliverer.deliver_next, POLL_SECONDS)
        if self.keep_days is not None:
            yield retention(self.store, self.keep_days)

    def _service(self, silent: Callable[[], float]) -> Service:
        free = self._is_free()
        per_second = self.per_second or (None if free else _PER_SECOND)
        return Service(
            self.store,
            RequestLimits(
                queued=self.queued or (None if free else _MOST_QUEUED),
                queued_seconds=self.queued_seconds,
                running=self.rules.running,
                streams=None if free else _MOST_STREAMS,
                ray=self.start is not LocalProcess,
            ),
            open_to_all=free,
            webhooks=self.webhooks,
            proxies=self.proxies,
            rate=None if per_second is None else _rate(per_second),
            silent=silent,
        )

    def _bound(self) -> socket.socket:
        """A socket that listens at the address."""
        try:
            return socket.create_server((self.host, self.port), backlog=BACKLOG)
        except OSError as error:
            raise InputError(
                f"--host {self.host} --port {self.port}: {error.strerror or error}"
            ) from None


def _silent(workers: Sequence[Worker]) -> float:
    """For how long the most silent of them has been silent."""
    return max((one.silent_seconds() for one in workers), default=0.0)


@dataclass
class _Watch:
    """Ends this process, for who starts it again, where no probe has: a hung thread cannot be.

    ``looks`` in a row found one silent: a whole process that was paused is given time to go on.
    """

    workers: Sequence[Worker]
    looks: int = 0

    def look(self) -> bool:
        """Look at the workers once."""
        self.looks = self.looks + 1 if _silent(self.workers) > SILENT_SECONDS else 0
        if self.looks >= _MOST_LOOKS:
            LOG.error("a worker hangs: the server ends")
            os._exit(1)  # jobs end with it, and are queued again when their leases have run out
        return False


class _Draining(uvicorn.Server):
    """Tells of the signal that ends it at once, and not when the last connection is closed."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[int], None]) -> None:
        super().__init__(config)
        self._drain = drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See :meth:`uvicorn.Server.handle_exit`."""
        self._drain(sig)
        super().handle_exit(sig, frame)


def _rate(per_second: float) -> RequestRate:
    return RequestRate(per_second, max(1.0, per_second * _BURST_SECONDS))


class Connection(H11Protocol):
    """Closes a connection whose request does not arrive, and one too many at once."""

    most: int
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        else:
            self._wait()

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of the headers; a body has limits of its own."""
        super().data_received(data)
        if self._is_answering():
            self._stop_waiting()
        elif self._waiting is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        cycle = cast(Any, self.cycle)
        return cycle is not None and not cycle.response_complete

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        if not self._is_answering():
            self.transport.close()


def connections() -> type[Connection]:
    """The protocol of a server, for as many connections as this process may have files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _MOST_FILES if hard == resource.RLIM_INFINITY else min(_MOST_FILES, hard)
    if soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    room = max(files, soft) - _OTHER_FILES
    return type("Connection", (Connection,), {"most": max(room, 16)})
