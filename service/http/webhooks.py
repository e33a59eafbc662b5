"""Webhooks: jobs that have ended are told to addresses that the server was started for alone.

The headers are those of Standard Webhooks. No redirect is followed, the body of an answer is not
read, and a name is resolved once: what is checked is what is connected to.
"""

import base64
import contextlib
import hashlib
import hmac
import http.client
import ipaddress
import json
import socket
import ssl
import threading
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

from sqlalchemy import select, update

from stagewright.graphs.documents.errors import InputError
from stagewright.service.http.tokens import Caller, Scope
from stagewright.service.http.views import view
from stagewright.service.jobs.records import DeliveryState
from stagewright.service.jobs.rows import DELIVERIES, JOBS
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.tracing import DELIVERED

SECRET = "STAGEWRIGHT_WEBHOOK_SECRET"  # the variable of the environment
_LEAST_SECRET = 24  # characters
SECONDS = 10.0  # for a delivery, whatever the other end does
POLL_SECONDS = 1.0  # between looks at what is due
_PORTS = {"http": 80, "https": 443}
PAUSES = (30.0, 120.0, 480.0, 1920.0, 7680.0, 30720.0)  # seconds before each further attempt


@dataclass(frozen=True, slots=True)
class Webhooks:
    """Where deliveries may go: ``origins`` such as https://example.com; ``secret`` signs them."""

    origins: tuple[str, ...]
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        for one in self.origins:
            if one not in (_origin(_parts(one)), _origin(_parts(one)) + "/"):
                raise InputError(
                    f"--webhook-origin {one!r}: write it as https://HOST or with :PORT"
                )
        if len(self.secret) < _LEAST_SECRET:
            raise InputError(
                f"webhooks are signed: set {SECRET} to a random text of at least {_LEAST_SECRET} "
                "characters"
            )

    def require_allowed(self, url: str) -> None:
        """Refuse a URL that is not of one of the origins."""
        if _origin(_parts(url)) not in {one.rstrip("/") for one in self.origins}:
            raise InputError(f"webhook: must be at one of {', '.join(self.origins)}")

    def secret_of(self, user: str) -> str:
        """The secret that signs what a user is told, as receivers take it."""
        return "whsec_" + base64.b64encode(self._key(user)).decode()

    def signature(self, user: str, number: str, at: int, body: str) -> str:
        """The signature of a delivery (Standard Webhooks, v1)."""
        told = hmac.digest(self._key(user), f"{number}.{at}.{body}".encode(), hashlib.sha256)
        return "v1," + base64.b64encode(told).decode()

    def _key(self, user: str) -> bytes:
        # A user who knows their own cannot sign for others.
        return hmac.digest(self.secret.encode(), user.encode(), hashlib.sha256)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A webhook of a job that has ended; ``number`` is the same at every attempt."""

    number: int
    job: str
    url: str
    is_last: bool


class Deliveries:
    """The deliveries of a store."""

    def __init__(self, store: ServiceStore) -> None:
        self._store, self._engine, self._clock = store, store.engine, store.clock

    def claim(self) -> Delivery | None:
        """The next delivery that is due; unless it is `done` it is due again after a pause."""
        due = (DELIVERIES.c.state == DeliveryState.WAITING, DELIVERIES.c.due <= self._clock())
        asked = (
            select(DELIVERIES.c.number, DELIVERIES.c.job, DELIVERIES.c.attempts, JOBS.c.webhook)
            .join(JOBS, JOBS.c.id == DELIVERIES.c.job)
            .where(*due)
            .order_by(DELIVERIES.c.due)
            .limit(1)
        )
        with self._engine.connect() as database:  # without a lock, as this is asked all the time
            if database.execute(asked).first() is None:
                return None
        with self._store.writing() as database:
            locked = asked.with_for_update(skip_locked=True, of=DELIVERIES)
            row = database.execute(locked).one_or_none()
            if row is None:
                return None
            is_last = row.attempts >= len(PAUSES)
            pause = 0.0 if is_last else PAUSES[row.attempts]
            database.execute(
                update(DELIVERIES)
                .where(DELIVERIES.c.number == row.number)
                .values(
                    attempts=row.attempts + 1, due=self._clock() + pause,
                    state=DeliveryState.GIVEN_UP if is_last else DeliveryState.WAITING,
                )
            )  # fmt: skip
        return Delivery(row.number, row.job, row.webhook, is_last)

    def done(self, delivery: Delivery) -> None:
        """The delivery has arrived."""
        self._write(delivery, state=DeliveryState.DELIVERED, reason="")

    def failed(self, delivery: Delivery, reason: str) -> None:
        """An attempt has failed; it is tried again unless it was the last."""
        self._write(delivery, reason=reason)

    def _write(self, delivery: Delivery, **values: str) -> None:
        with self._store.writing() as database:
            mine = DELIVERIES.c.number == delivery.number
            database.execute(update(DELIVERIES).where(mine).values(**values))


@dataclass(frozen=True, slots=True)
class Deliverer:
    """Delivers the webhooks that are due."""

    store: ServiceStore
    webhooks: Webhooks

    def deliver_next(self) -> bool:
        """Deliver the webhook that is due first; whether there was any."""
        due = Deliveries(self.store).claim()
        if due is not None:
            self.deliver(due)
        return due is not None

    def deliver(self, delivery: Delivery) -> bool:
        """Tell a receiver that a job has ended; whether the delivery arrived."""
        job = self.store.get(delivery.job)
        if job is None or job.finished is None:  # discarded, or queued again meanwhile
            return False
        at, owner = int(self.store.clock()), Caller(job.user, Scope.READ)
        ended = {"type": "job.ended", "timestamp": int(job.finished)}
        body = json.dumps(ended | {"data": view(job, owner).model_dump()})
        number = f"{job.id}-{delivery.number}"
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "stagewright",
            "webhook-id": number,
            "webhook-timestamp": str(at),
            "webhook-signature": self.webhooks.signature(job.user, number, at, body),
        }
        deliveries, reason = Deliveries(self.store), self._failure(delivery.url, body, headers)
        if reason is None:
            deliveries.done(delivery)
        else:
            deliveries.failed(delivery, reason)
        failed = "given up" if delivery.is_last else "failed"
        DELIVERED.labels("delivered" if reason is None else failed).inc()
        return reason is None

    def _failure(self, url: str, body: str, headers: dict[str, str]) -> str | None:
        """Post a webhook; why that failed, without details of this network, or None."""
        try:
            self.webhooks.require_allowed(url)
            status = post(url, body.encode(), headers)
        except InputError as error:
            return str(error)
        except (TimeoutError, http.client.HTTPException):
            return f"no answer of HTTP within {SECONDS:g} s"
        except OSError as error:
            return ": ".join(filter(None, ("no connection", error.strerror)))
        return None if 200 <= status < 300 else f"HTTP {status}"


def post(url: str, body: bytes, headers: dict[str, str]) -> int:
    """The status with which a URL answers; it must do so within `SECONDS`."""
    parts = _parts(url)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    opened = socket.create_connection((_address(host, port), port), SECONDS)
    watch = threading.Timer(SECONDS, _shut, [opened])
    watch.start()
    try:
        if parts.scheme == "https":
            opened = ssl.create_default_context().wrap_socket(opened, server_hostname=host)
        connection = http.client.HTTPConnection(host, port)
        connection.sock = opened
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, body, headers | {"Host": parts.netloc})
        return connection.getresponse().status
    finally:
        watch.cancel()
        opened.close()


def _shut(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)


def _address(host: str, port: int) -> str:
    """The IP address of a host; refuses names of this machine or of its network's services."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(one[4][0]) for one in found]
    for one in addresses:
        if host not in (one, "localhost") and not _is_reachable(one):
            raise OSError(f"{host} is {one}")
    return addresses[0]


def _is_reachable(address: str) -> bool:
    """Whether an IP address is neither of this machine nor of its network's services."""
    found = ipaddress.ip_address(address.partition("%")[0])
    plain = getattr(found, "ipv4_mapped", None) or found
    return not (
        plain.is_loopback
        or plain.is_link_local
        or plain.is_multicast
        or plain.is_unspecified
        or plain.is_reserved
    )


def _parts(url: str) -> SplitResult:
    """The parts of a URL of http or https, which names no user and no fragment."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InputError(f"webhook: {url!r} is no URL") from None
    plain = url.isascii() and url.isprintable() and " " not in url and "\\" not in url
    if not plain or parts.scheme not in _PORTS or not parts.hostname or port == 0:
        raise InputError(f"webhook: {url!r} is no URL of http or https")
    if "@" in parts.netloc or parts.fragment:
        raise InputError("webhook: a URL without a user's name and without a fragment is needed")
    return parts


def _origin(parts: SplitResult) -> str:
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    port = parts.port or _PORTS[parts.scheme]
    return f"{parts.scheme}://{host}" + ("" if port == _PORTS[parts.scheme] else f":{port}")
