"""The audit log: who changed what, who read what is another user's, and who was refused."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import WatchedFileHandler
from pathlib import Path

from starlette.types import Scope

from stagewright.graphs.documents.errors import InputError
from stagewright.service.http.tokens import Caller, without_tokens
from stagewright.service.tracing import LOG, Lines, note

WHAT = "audit"
_REFUSED = (401, 403)  # further requests of an address, or user, who sends too many are not listed
_CHANGE_NOTHING = ("validate", "describe_config")  # routes whose requests have a body all the same


@contextmanager
def audited(file: Path | None) -> Iterator[None]:
    """Append each line of the audit log to a file, which may be rotated, as a JSON object.

    Raises
    ------
    InputError
        If it cannot be written.
    """
    if file is None:
        yield
        return
    try:
        file.touch(0o600)
        handler = WatchedFileHandler(file)
    except OSError as error:
        raise InputError(f"--audit-log {file}: {error.strerror or error}") from None
    handler.setFormatter(Lines(as_json=True))
    handler.addFilter(lambda record: record.getMessage() == WHAT)
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        handler.close()


def audit_request(scope: Scope, code: int, headers: Mapping[str, str]) -> None:
    """Note a request that changes something, reads what is another user's, or is refused."""
    caller: Caller | None = scope["state"].get("caller")
    operation = getattr(scope.get("route"), "name", "none")
    changes = scope["method"] in ("POST", "DELETE") and operation not in _CHANGE_NOTHING
    owners = sorted(caller.owners - {caller.user}) if caller else []
    if code not in _REFUSED and not (code < 400 and (changes or owners)):
        return
    path, made = scope["path"], headers.get("location", "")
    told: dict[str, object] = {"owners": ",".join(owners)} if owners else {}
    if made:
        told["made"] = made.rpartition("/")[2]
    note(
        WHAT, event="refused" if code in _REFUSED else operation,
        user=caller and caller.user, token=scope["state"].get("token"),
        address=(scope["client"] or ("",))[0], method=scope["method"],
        path=without_tokens(path), code=code, **told,
    )  # fmt: skip
