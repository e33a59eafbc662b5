"""Requests of any peer with any headers, asked of an application without a server."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stagewright.service.http.tokens import Caller

OTHER = "192.0.2.7"  # the address of a client
Pairs = Iterable[tuple[str, str | bytes]]


@dataclass
class Answer:
    """What an application answers to one request, and what it has found out about it."""

    status: int
    headers: dict[str, str]
    body: bytes
    scope: dict[str, Any]

    @property
    def caller(self) -> Caller | None:
        found: Caller | None = self.scope["state"].get("caller")
        return found


async def asked(
    app: Any, scope: dict[str, Any], *body: dict[str, Any], sent: list[Any] | None = None
) -> Answer:
    """What is answered to a body that comes as these messages; `sent` holds it as it goes."""
    sent = [] if sent is None else sent
    waiting = list(body)

    async def receive() -> Any:
        if not waiting:
            await asyncio.sleep(1000)
        return waiting.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    whole = b"".join(one.get("body", b"") for one in sent)
    return Answer(sent[0]["status"], headers, whole, scope)


def scope_of(target: str, given: Pairs, peer: str | None, method: str = "GET") -> dict[str, Any]:
    """A request, at a host that is not this machine if its headers name none."""
    path, _, query = target.partition("?")
    host = [] if any(name == "Host" for name, _ in given) else [("Host", "planner.example")]
    headers = [
        (name.lower().encode(), one if isinstance(one, bytes) else one.encode())
        for name, one in [*host, *given]
    ]
    return {
        "type": "http", "http_version": "1.1", "method": method, "path": path,
        "raw_path": path.encode(), "query_string": query.encode(), "headers": headers,
        "scheme": "http", "server": ("127.0.0.1", 8754),
        "client": None if peer is None else (peer, 1),
    }  # fmt: skip


def ask(
    app: Any, target: str, given: Pairs = (), *, peer: str | None = OTHER, body: str | None = None
) -> Answer:
    """Send one request from a peer, with these headers as they are; a POST if there is a body."""
    scope = scope_of(target, given, peer, "GET" if body is None else "POST")
    whole = {"type": "http.request", "body": (body or "").encode()}
    return asyncio.run(asked(app, scope, whole))
