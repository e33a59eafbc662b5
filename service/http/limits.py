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

    ``body_bytes`` of a request, ``seconds`` and ``threads`` of a search, and ``devices`` and
    ``layers`` of a problem. ``ray``: sweeps may use the Ray cluster on which jobs are solved.
    """

    body_bytes: int = 16_000_000
    seconds: float = 3600.0
    threads: int = 4
    devices: int = 4096
    layers: int = 2000
    ray: bool = False

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
        for name, most in (("time_limit", self.seconds), ("threads", self.threads)):
            if given.get(name) is not None and given[name] > most:
                raise InputError(f"{name}: at most {most:g} here, got {given[name]:g}")
        for name, most in (("cluster", self.devices), ("chain", self.layers)):
            if given.get(name) is not None and len(given[name]) > most:
                raise InputError(f"{name}: at most {most} parts here, got {len(given[name])}")
        if given.get("engine") == "ray" and not self.ray:
            raise InputError("engine: sweeps of this service run on its own machine")
        if given.get("address") is not None:
            raise InputError("address: jobs of this service connect to no other cluster")
