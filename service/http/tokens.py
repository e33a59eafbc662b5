"""Bearer tokens and their scopes; only digests of tokens are stored."""

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import unquote

from sqlalchemy import ColumnElement, Engine, Row, delete, func, insert, or_, select, update
from sqlalchemy.exc import SQLAlchemyError

from stagewright.graphs.documents.errors import InputError
from stagewright.service.jobs.rows import TOKENS

PREFIX = "sw_"
SEEN_SECONDS = 2.0  # how old may be what `Tokens.is_valid` knows
_USED_SECONDS = 3600.0  # between notes of the use of a token
_ID = 12  # characters of an id
_NAME = 200  # characters of a user's name at most
_TOKEN = re.compile(PREFIX + "[A-Za-z0-9_-]{43}")
_ID_OF_ROW = func.substr(TOKENS.c.digest, 1, _ID)


class Scope(StrEnum):
    """What a token allows; each includes the ones before it."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a user's name, what they may do, and the id of their token if they have one.

    ``owners`` are the users whose jobs this request has read so far.
    """

    user: str
    scope: Scope
    token: str | None = None
    owners: set[str] = field(default_factory=set, compare=False)

    def may(self, scope: Scope) -> bool:
        """Whether the scope is allowed."""
        order = list(Scope)
        return order.index(scope) <= order.index(self.scope)


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What is known of a token.

    Times are seconds since 1970: ``expires`` None: never; ``used`` is that of its last use, up to
    an hour too early, None if it was not used.
    """

    id: str
    user: str
    scope: Scope
    created: float
    expires: float | None
    used: float | None


class Tokens:
    """The tokens of a store; one that has expired is there until it is revoked."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.time) -> None:
        self._engine, self._clock = engine, clock
        self._lock = threading.Lock()
        self._seen: dict[str, float | None] = {}
        self._seen_at = -SEEN_SECONDS

    def create(self, user: str, scope: Scope, seconds: float | None = None) -> str:
        """A new token, valid for so long, which is not stored and cannot be shown again."""
        require_user(user)
        token, now = PREFIX + secrets.token_urlsafe(32), self._clock()
        values = {
            "digest": _digest(token), "user": user, "scope": scope, "created": now,
            "expires": None if seconds is None else now + seconds,
        }  # fmt: skip
        with self._engine.begin() as database:
            database.execute(insert(TOKENS).values(values))
        return token

    def revoke(self, user: str | None = None, token: str | None = None) -> list[TokenRecord]:
        """Delete the token of an id, or all tokens of a user; those that there were."""
        which: ColumnElement[bool] = TOKENS.c.user == user
        if token is not None:
            which = _ID_OF_ROW.in_((token,))
        with self._engine.begin() as database:
            found = database.execute(select(TOKENS).where(which)).all()
            database.execute(delete(TOKENS).where(which))
        return [_record(one) for one in found]

    def all(self) -> list[TokenRecord]:
        """All tokens, the oldest first."""
        with self._engine.connect() as database:
            return [
                _record(one) for one in database.execute(select(TOKENS).order_by(TOKENS.c.created))
            ]

    def exist(self) -> bool:
        """Whether there are any."""
        with self._engine.connect() as database:
            return database.execute(select(TOKENS.c.digest).limit(1)).first() is not None

    def caller(self, token: str) -> Caller | None:
        """Who has this token; None if nobody has, or it has expired."""
        digest, now = _digest(token), self._clock()
        with self._engine.connect() as database:
            row = database.execute(select(TOKENS).where(TOKENS.c.digest == digest)).one_or_none()
        if row is None or not hmac.compare_digest(row.digest, digest):
            return None
        if row.expires is not None and row.expires <= now:
            return None
        if row.used is None or now - row.used > _USED_SECONDS:
            self._note_use(digest, now)
        return Caller(row.user, Scope(row.scope), id_of(token))

    def is_valid(self, token: str) -> bool:
        """Whether there is a token of that id; what is revoked may be so for `SEEN_SECONDS` more.

        However often it is called, the store is asked once in that time.
        """
        with self._lock:
            if time.monotonic() - self._seen_at >= SEEN_SECONDS:
                with self._engine.connect() as database:
                    found = database.execute(select(_ID_OF_ROW, TOKENS.c.expires)).all()
                self._seen = {one: expires for one, expires in found}
                self._seen_at = time.monotonic()
            expires = self._seen.get(token, 0.0)
        return expires is None or expires > self._clock()

    def _note_use(self, digest: str, now: float) -> None:
        unknown = or_(TOKENS.c.used.is_(None), TOKENS.c.used < now - _USED_SECONDS)
        which = TOKENS.c.digest == digest, unknown
        # A store that takes no writes now still answers who asks.
        with suppress(SQLAlchemyError), self._engine.begin() as database:
            database.execute(update(TOKENS).where(*which).values(used=now))


def require_user(name: str) -> None:
    """Refuse a text that is no name of a user.

    Proxies may join several headers by commas (RFC 9110, 5.3), so that a name has none.
    """
    wrong = ""
    if not 1 <= len(name) <= _NAME:
        wrong = f"has {len(name)} characters, not 1 to {_NAME}"
    elif not name.isprintable() or name != name.strip():
        wrong = "has characters that are not printed, or spaces at an end"
    elif "," in name:
        wrong = "has a comma"
    if wrong:
        raise InputError(f"the name of the user {wrong}")


def has_token(query: str) -> bool:
    """Whether there is a token in the query of a URL."""
    return _TOKEN.search(unquote(query)) is not None


def without_tokens(text: str) -> str:
    """The text, with the tokens in it left out."""
    return _TOKEN.sub(f"{PREFIX}...", text)


def id_of(token: str) -> str:
    """The id of a token: the beginning of its digest, from which nobody finds the token."""
    return _digest(token)[:_ID]


def _record(row: Row[Any]) -> TokenRecord:
    return TokenRecord(
        id=row.digest[:_ID], user=row.user, scope=Scope(row.scope), created=row.created,
        expires=row.expires, used=row.used,
    )  # fmt: skip


def _digest(token: str) -> str:
    # Tokens are 256 random bits: a plain hash of one cannot be guessed from.
    return hashlib.sha256(token.encode()).hexdigest()
