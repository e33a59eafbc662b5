"""Bearer tokens and their scopes; only digests of tokens are stored."""

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Engine, delete, insert, select

from stagewright.service.jobs.rows import TOKENS

_PREFIX = "sw_"


class Scope(StrEnum):
    """What a token allows; each includes the ones before it."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a user's name, and what they may do."""

    user: str
    scope: Scope

    def may(self, scope: Scope) -> bool:
        """Whether the scope is allowed."""
        order = list(Scope)
        return order.index(scope) <= order.index(self.scope)


class Tokens:
    """The tokens of a store."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def create(self, user: str, scope: Scope) -> str:
        """A new token, which is not stored and cannot be shown again."""
        token = _PREFIX + secrets.token_urlsafe(32)
        with self._engine.begin() as database:
            database.execute(
                insert(TOKENS).values(
                    digest=_digest(token), user=user, scope=scope, created=time.time()
                )
            )
        return token

    def revoke(self, user: str) -> int:
        """Delete all tokens of a user; how many there were."""
        with self._engine.begin() as database:
            return database.execute(delete(TOKENS).where(TOKENS.c.user == user)).rowcount

    def exist(self) -> bool:
        """Whether there are any."""
        with self._engine.connect() as database:
            return database.execute(select(TOKENS.c.digest).limit(1)).first() is not None

    def caller(self, token: str) -> Caller | None:
        """Who has this token; None if nobody has."""
        digest = _digest(token)
        with self._engine.connect() as database:
            row = database.execute(select(TOKENS).where(TOKENS.c.digest == digest)).one_or_none()
        if row is None or not hmac.compare_digest(row.digest, digest):
            return None
        return Caller(row.user, Scope(row.scope))


def _digest(token: str) -> str:
    # Tokens are 256 random bits: a plain hash of one cannot be guessed from.
    return hashlib.sha256(token.encode()).hexdigest()
