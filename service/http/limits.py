"""Limits of requests: bytes of a body, size of what is solved."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest

from stagewright.graphs.documents.errors import InputError
from stagewright.service.requests import Request


class TooLargeError(Exception):
    """A body of more bytes than are taken."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What may be asked for.

    ``body_bytes`` of a request, ``seconds`` and ``threads`` of a search (and processes of a sweep),
    and ``devices`` and ``layers`` of a problem.
    """

    body_bytes: int = 16_000_000
    seconds: float = 3600.0
    threads: int = 4
    devices: int = 4096
    layers: int = 2000

    async def body(self, request: HttpRequest) -> bytes:
        """The body; raises TooLargeError as soon as it is larger than allowed."""
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self.body_bytes:
                raise TooLargeError(f"the body has more than {self.body_bytes} bytes")
            parts.append(part)
        return b"".join(parts)

    def require_modest(self, request: Request) -> None:
        """Refuse what would take too long, or would go beyond this machine."""
        given: Mapping[str, Any] = request.given()
        numbers = (
            ("time_limit", self.seconds),
            ("threads", self.threads),
            ("workers", self.threads),
        )
        for name, most in numbers:
            if given.get(name) is not None and given[name] > most:
                raise InputError(f"{name}: at most {most:g} here, got {given[name]:g}")
        for name, most in (("cluster", self.devices), ("chain", self.layers)):
            if given.get(name) is not None and len(given[name]) > most:
                raise InputError(f"{name}: at most {most} parts here, got {len(given[name])}")
        if given.get("engine") == "ray" or given.get("address") is not None:
            raise InputError("engine: sweeps of this service run on its own machine")
