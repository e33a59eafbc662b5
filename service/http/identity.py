"""Proxies before the service: which are trusted, and the users whom they name.

Who signs in, and how, is the proxy's matter (OpenID Connect is spoken by oauth2-proxy and others);
the service takes the name of the user from a header of the proxy's requests.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from fastapi import HTTPException, Request
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from stagewright.graphs.documents.errors import InputError
from stagewright.service.http.tokens import Caller, Scope, require_user

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

LOCAL = Caller("local", Scope.ADMIN)
_HEADER = re.compile("[A-Za-z][A-Za-z0-9-]*")  # some proxies drop others, or write _ as -
_NOT_NAMES = {
    "authorization", "connection", "content-length", "content-type", "cookie", "forwarded", "host",
    "origin", "transfer-encoding", "x-forwarded-for", "x-forwarded-proto",
}  # fmt: skip
_ROOT = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
_OWN = ("/v1", "/page", "/health", "/metrics")
_SITE_BITS = 64  # of an address of IPv6; whoever has one has all that begin with them


@dataclass(frozen=True, slots=True)
class Proxies:
    """The proxies that are trusted, and what is taken from their requests.

    ``identity_header`` names the user, who may submit; ``admins`` of them may do all. ``root_path``
    is the prefix under which the proxies serve the service, which they strip or not.
    """

    networks: tuple[Network, ...] = ()
    identity_header: str | None = None
    admins: frozenset[str] = frozenset()
    root_path: str = ""

    def __post_init__(self) -> None:
        header = self.identity_header
        if header is not None:
            if not _HEADER.fullmatch(header) or header.lower() in _NOT_NAMES:
                raise InputError(
                    f"--identity-header {header!r}: write a header that the proxy sets, such as "
                    "X-Forwarded-User"
                )
            if not self.networks:
                raise InputError(
                    f"--identity-header {header}: anybody may send it: name the proxy that sets "
                    "it by --trusted-proxy"
                )
        elif self.admins:
            raise InputError("--admin goes with --identity-header; tokens have scopes")
        if self.root_path and (
            not _ROOT.fullmatch(self.root_path) or f"{self.root_path}/".startswith(_OWN_PLACES)
        ):
            raise InputError(
                f"--root-path {self.root_path!r}: write it as /planner, other than "
                f"{', '.join(_OWN)}"
            )
        for one in self.admins:
            require_user(one)

    def trust(self, address: Address | None) -> bool:
        """Whether a peer is one of the proxies; None is no address of IP."""
        return address is not None and any(address in one for one in self.networks)

    def caller(self, request: Request) -> Caller | None:
        """The user whom a trusted proxy names, None if it names none.

        Raises
        ------
        HTTPException
            If it names several, or what is no name.
        """
        if self.identity_header is None:
            return None
        name = self.identity_header.lower().encode()
        given = [value for one, value in request.headers.raw if one == name]
        if not any(given):
            return None
        try:
            if len(given) > 1:
                raise InputError(f"there are {len(given)}")
            user = given[0].decode()
            require_user(user)
            if user == LOCAL.user:
                raise InputError("that name is of those who use a service without tokens")
        except (InputError, UnicodeDecodeError) as error:
            told = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
            raise unknown(f"{self.identity_header}: {told}") from None
        return Caller(user, Scope.ADMIN if user in self.admins else Scope.SUBMIT)


def unknown(detail: str) -> HTTPException:
    """What a request is answered that is nobody's who is known."""
    return HTTPException(401, detail, {"WWW-Authenticate": "Bearer"})


_OWN_PLACES = tuple(f"{one}/" for one in _OWN)


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """The networks that ``--trusted-proxy`` names, or single addresses."""
    return tuple(map(_network, texts))


def _network(text: str) -> Network:
    try:
        found = ipaddress.ip_network(text)
    except ValueError as error:
        raise InputError(
            f"--trusted-proxy {text!r}: write an address or a network, such as 10.0.0.0/8 ({error})"
        ) from None
    if found.prefixlen == 0:
        raise InputError(f"--trusted-proxy {text}: everybody is there; name the proxies alone")
    if getattr(found.network_address, "ipv4_mapped", None) is not None:
        raise InputError(f"--trusted-proxy {text}: write it as IPv4")
    return found


def address_of(host: str | None) -> Address | None:
    """The address of a peer; one of IPv4 that is written as IPv6 is one of IPv4."""
    try:
        found = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def site_of(request: Request) -> str:
    """Whose requests count together where nobody is known: an address, or a /64 of IPv6."""
    host = "" if request.client is None else request.client.host
    found = address_of(host)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((found, _SITE_BITS), strict=False))
    return str(found or host)


class Forwarded:
    """Applies what a trusted proxy says of its client, and drops who others say that they are.

    The client's address and the scheme are read by uvicorn, from X-Forwarded-For and
    X-Forwarded-Proto: the last address that is no proxy's.
    """

    def __init__(self, app: ASGIApp, proxies: Proxies) -> None:
        self._app, self._proxies = app, proxies
        header = proxies.identity_header
        self._header = None if header is None else header.lower().encode()
        trusted = [str(one) for one in proxies.networks]
        self._proxied: ASGIApp = ProxyHeadersMiddleware(app, trusted)  # type: ignore[assignment, arg-type]

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Answer a request by the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["root_path"] = root = self._proxies.root_path
        if not scope["path"].startswith(f"{root}/"):  # as ASGI has it, stripped by the proxy or not
            scope["path"] = f"{root}/" if scope["path"] == root else root + scope["path"]
        host, port = scope["client"] or (None, 0)
        peer = address_of(host)
        if self._proxies.trust(peer):
            scope["client"] = str(peer), port
            await self._proxied(scope, receive, send)
            return
        scope["headers"] = [one for one in scope["headers"] if one[0] != self._header]
        await self._app(scope, receive, send)
