"""Documents that users have uploaded: models, clusters and traces, by the digest of their text."""

import hashlib
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select

from stagewright.service.jobs.rows import UPLOADS, newest
from stagewright.service.jobs.store import ConflictError, ServiceStore


@dataclass(frozen=True, slots=True)
class Upload:
    """A document of a user; ``id`` is its digest, ``created`` seconds since 1970."""

    id: str
    kind: str
    name: str
    created: float


_FIELDS = [UPLOADS.c[name] for name in Upload.__dataclass_fields__]


class Uploads:
    """The uploaded documents of a store; every user sees their own."""

    def __init__(self, store: ServiceStore) -> None:
        self._store, self._engine, self._clock = store, store.engine, store.clock

    def add(self, user: str, kind: str, name: str, document: str, most: int) -> tuple[Upload, bool]:
        """Keep a canonical text; one that the user has already is that one, and not new.

        Raises
        ------
        ConflictError
            If it is new, and the user has ``most`` documents.
        """
        made = {
            "id": hashlib.sha256(document.encode()).hexdigest(), "user": user, "kind": kind,
            "name": name, "document": document, "created": self._clock(),
        }  # fmt: skip
        with self._store.writing() as database:
            mine = (UPLOADS.c.user == user, UPLOADS.c.id == made["id"])
            row = database.execute(select(*_FIELDS).where(*mine)).one_or_none()
            if row is None:
                _require_shelf(database, user, most)
                database.execute(insert(UPLOADS).values(made))
                row = database.execute(select(*_FIELDS).where(*mine)).one()
                return _upload(row), True
        return _upload(row), False

    def get(self, user: str, upload: str) -> tuple[Upload, str] | None:
        """A user's document of that whole id, and its text; None if there is none."""
        asked = select(UPLOADS).where(UPLOADS.c.user == user, UPLOADS.c.id == upload)
        with self._engine.connect() as database:
            row = database.execute(asked).one_or_none()
        return None if row is None else (_upload(row), row.document)

    def page(
        self, user: str, *, before: str | None = None, kind: str | None = None, limit: int
    ) -> list[Upload]:
        """A user's newest documents, from before the one of that id on."""
        found = None if before is None else self.get(user, before)
        last = None if found is None else (found[0].created, found[0].id)
        asked = newest(select(*_FIELDS).where(UPLOADS.c.user == user), UPLOADS, limit, last)
        if kind is not None:
            asked = asked.where(UPLOADS.c.kind == kind)
        with self._engine.connect() as database:
            return [_upload(row) for row in database.execute(asked)]

    def discard(self, user: str, upload: str) -> bool:
        """Delete a user's document; whether there was one. Jobs that were made of it stay."""
        with self._store.writing() as database:
            found = delete(UPLOADS).where(UPLOADS.c.user == user, UPLOADS.c.id == upload)
            return bool(database.execute(found).rowcount)


def _require_shelf(database: Connection, user: str, most: int) -> None:
    asked = select(func.count()).where(UPLOADS.c.user == user)
    if (kept := database.execute(asked).scalar_one()) >= most:
        raise ConflictError(f"you have {kept} uploads, and may have no more: delete some")


def _upload(row: Row[Any]) -> Upload:
    return Upload(row.id, row.kind, row.name, row.created)
