"""Connections of a server: no more than it has files for, each with a request that arrives."""

import asyncio
import resource
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0  # for the headers of a request to arrive, from its first byte
BACKLOG = 128  # connections that are taken before the first of them is looked at
_OTHER_FILES = 4 * BACKLOG  # taken and not looked at; of the store, and the processes of jobs
_MOST_FILES = 65_536


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
