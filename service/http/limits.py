"""Limits of requests: bytes and depth of a body, size of what is solved, how many at a time."""

import asyncio
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import Architecture
from stagewright.service.requests import Request, plain_json

MOST_KNOWN = 10_000  # buckets before those that are full are forgotten


@dataclass(slots=True)
class RequestRate:
    """A bucket of ``burst`` requests for each user, filled with ``per_second``.

    It is in the memory of this server alone, and its clock is one that nobody sets.
    """

    per_second: float
    burst: float
    clock: Callable[[], float] = time.monotonic
    _buckets: dict[str, tuple[float, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, user: str) -> None:
        """Take a request out of a user's bucket; raises TooManyError if it is empty."""
        with self._lock:
            now = self.clock()
            left = self._left(user, now)
            if left < 1.0:
                raise TooManyError(
                    f"more than {self.per_second:g} requests a second",
                    (1.0 - left) / self.per_second,
                )
            if len(self._buckets) >= MOST_KNOWN:
                self._forget(now)
            self._buckets[user] = left - 1.0, now

    def give_back(self, user: str) -> None:
        """Put a request back that was taken before it was known to be no one to count."""
        with self._lock:
            now = self.clock()
            self._buckets[user] = min(self.burst, self._left(user, now) + 1.0), now

    def _left(self, user: str, now: float) -> float:
        left, then = self._buckets.get(user, (self.burst, now))
        return min(self.burst, left + (now - then) * self.per_second)

    def _forget(self, now: float) -> None:
        """Forget users whose buckets are full, as those of new users are."""
        self._buckets = {
            user: kept for user, kept in self._buckets.items() if self._left(user, now) < self.burst
        }


def seconds_to_wait(seconds: float) -> str:
    """What ``Retry-After`` says: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))


_WAIT_SECONDS = 10.0  # until a queue may be shorter
# The end of a text may be missing: then nothing after it is looked at twice.
_TEXTS = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


class TooLargeError(Exception):
    """A body of more bytes than are taken."""


class TooSlowError(Exception):
    """A body that takes longer than is waited for."""


class TooManyError(Exception):
    """More requests, or jobs, than a user may have; ``seconds`` until it is worth asking again."""

    def __init__(self, detail: str, seconds: float) -> None:
        super().__init__(detail)
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits on requests of a service.

    ``body_bytes`` of a request, ``body_seconds`` for it to arrive, ``depth`` of brackets in it, its
    ``parts`` (lists and objects) and ``values``, ``seconds`` and ``threads`` of a search (and
    processes of a sweep), ``devices``, ``layers`` and ``operations`` of a problem, ``queued`` jobs
    of a user, the ``queued_seconds`` of their time limits, ``running`` jobs of a user (more wait)
    and ``streams`` of events that are read at a time (None: any number), and documents that a user
    has uploaded. ``ray``: sweeps may use the Ray cluster on which jobs are solved.
    """

    body_bytes: int = 16_000_000
    body_seconds: float = 60.0
    depth: int = 32
    parts: int = 300_000
    values: int = 1_000_000
    seconds: float = 3600.0
    threads: int = 4
    devices: int = 4096
    layers: int = 2000
    operations: int = 10_000
    queued: int | None = None
    queued_seconds: float | None = None
    running: int | None = None
    uploads: int = 100
    streams: int | None = None
    ray: bool = False

    async def body(self, request: HttpRequest) -> bytes:
        """The body; raises TooLargeError or TooSlowError as soon as it is larger, or later."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > self.body_bytes:
                        raise TooLargeError(f"the body has more than {self.body_bytes} bytes")
                    parts.append(part)
        except TimeoutError:
            told = f"the body was not received within {self.body_seconds:g} s"
            raise TooSlowError(told) from None
        return b"".join(parts)

    def require_small(self, text: bytes) -> None:
        """Refuse a body of too many values, or nested too deeply, before anything is made of it."""
        _require_few("texts", text.count(b'"') // 2, self.values)
        bare = _TEXTS.sub(b"", text)
        brackets = bare.translate(None, _NO_BRACKETS)
        _require_few("lists and objects", brackets.count(b"[") + brackets.count(b"{"), self.parts)
        _require_few("values", bare.count(b","), self.values)
        steps = _STEPS[np.frombuffer(brackets, np.uint8)]
        depth = int(steps.cumsum(dtype=np.int32).max(initial=0))
        if depth > self.depth:
            raise InputError(f"the body has {depth} brackets inside each other, over {self.depth}")

    def require_counted(self, text: bytes) -> None:
        """Refuse a problem of too many layers or operations, before its objects are made."""
        body = plain_json(text)
        given = body if isinstance(body, dict) else {}
        chain, jobs = given.get("chain"), given.get("jobs")
        layers = chain.get("layers") if isinstance(chain, dict) else None
        if isinstance(layers, list) and len(layers) > self.layers:
            raise InputError(f"chain: at most {self.layers} layers here, got {len(layers)}")
        if isinstance(jobs, list):
            count = sum(len(one) for one in jobs if isinstance(one, list))
            if count > self.operations:
                raise InputError(f"jobs: at most {self.operations} operations here, got {count}")

    def require_room(self, queued: Callable[[], tuple[int, float]], seconds: float | None) -> None:
        """Refuse another job of a user who has too many in the queue, or for too many seconds."""
        if self.queued is None and self.queued_seconds is None:
            return
        count, waiting = queued()
        then = waiting + (seconds or 0.0)
        if self.queued is not None and count >= self.queued:
            have = f"you have {count} jobs in the queue, and may have {self.queued}"
        elif self.queued_seconds is not None and then > self.queued_seconds:
            have = (
                f"the jobs that you have in the queue and this one have time limits of {then:g} s, "
                f"and may have {self.queued_seconds:g} s"
            )
        else:
            return
        raise TooManyError(f"{have}: wait, or stop some", _WAIT_SECONDS)

    def require_watchable(self, streams: int) -> None:
        """Refuse another stream of events of a user who reads too many on this server."""
        if self.streams is not None and streams >= self.streams:
            raise TooManyError(f"you read {streams} streams of events at a time", _WAIT_SECONDS)

    def require_modest(self, request: Request) -> None:
        """Refuse a request that would take too long, or would use other machines."""
        given: Mapping[str, Any] = request.given()
        numbers = (
            ("time_limit", self.seconds),
            ("threads", self.threads),
            ("workers", self.threads),
        )
        for name, most in numbers:
            if given.get(name) is not None and given[name] > most:
                raise InputError(f"{name}: at most {most:g} here, got {given[name]:g}")
        cluster = given.get("cluster")
        if cluster is not None and len(cluster) > self.devices:
            raise InputError(f"cluster: at most {self.devices} devices here, got {len(cluster)}")
        of = given.get("tuning") or request
        architecture = getattr(getattr(of, "problem", None), "architecture", None)
        if architecture is not None:
            self.require_layers(architecture)
        if given.get("engine") == "ray" and not self.ray:
            raise InputError("engine: sweeps of this service run on its own machine")
        if given.get("address") is not None:
            raise InputError("address: jobs of this service connect to no other cluster")

    def require_layers(self, architecture: Architecture) -> None:
        """Refuse a model of too many layers."""
        if architecture.layers > self.layers:
            raise InputError(
                f"config: at most {self.layers} layers here, got {architecture.layers}"
            )


def _require_few(what: str, count: int, most: int) -> None:
    if count > most:
        raise InputError(f"the body has {count} {what}, over {most}")
