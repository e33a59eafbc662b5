"""``serve``, ``token`` and ``backup``: the planning service."""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from stagewright.cli.commands import Options
from stagewright.cli.common import OnRay, Printed
from stagewright.cli.console import print_json, print_lines
from stagewright.cli.outputs import Writes
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import is_finite, parse_bytes
from stagewright.service.options import Option

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stagewright.service.workers.processes import Start

LEAST_MEMORY = 100e6  # bytes; a process that only starts takes more


class Stored(Options):
    """Where jobs are kept."""

    store: Annotated[str, Option(form="FILE_OR_URL", env="STAGEWRIGHT_STORE")] = (
        "stagewright-jobs.sqlite"
    )
    """A file of SQLite, or an SQLAlchemy URL of PostgreSQL
    (postgresql+psycopg://USER:PASSWORD@HOST/NAME)."""


class ServeOptions(Stored, OnRay):
    """What ``serve`` is asked."""

    host: str = "127.0.0.1"
    """Address to listen at."""
    port: Annotated[int, Ge(0), Le(65535)] = 8754
    """Port to listen at; 0: a free one."""
    workers: Annotated[int, Option(form="N"), Ge(0)] = 1
    """Jobs that are solved at a time; 0: other servers' workers do."""
    memory_limit: str = "8GB"
    """Memory that a job may take, for example 8GB."""
    rate: Annotated[float | None, Option(form="N")] = None
    """Requests a second of each user, ten times as many at once; default: 50 if there are tokens,
    else any number."""
    webhook_origin: Annotated[list[str] | None, Option(form="URL")] = None
    """Tell of the ends of jobs there, for example https://example.com; repeat it for several.
    STAGEWRIGHT_WEBHOOK_SECRET signs what is told."""
    keep_days: Annotated[float | None, Option(form="N")] = None
    """Delete jobs so many days after their ends; default: never."""


def serve(given: ServeOptions) -> int:
    """Serve plans over HTTP, and solve the jobs in processes of their own.

    On an address of this machine alone no token is needed as long as there is none; on any other it
    starts only if there are tokens.
    """
    limit = parse_bytes(given.memory_limit, "--memory-limit")
    if limit < LEAST_MEMORY:
        raise InputError(f"--memory-limit must be at least 100MB, got {given.memory_limit}")
    for name, value, unit in (
        ("rate", given.rate, "requests a second"),
        ("keep-days", given.keep_days, "days"),
    ):
        if value is not None and not (is_finite(value) and value > 0):
            raise InputError(f"--{name} must be more than 0 {unit}, got {value:g}")
    given.require()
    try:
        from stagewright.service.http.server import Server
        from stagewright.service.http.webhooks import SECRET, Webhooks
        from stagewright.service.jobs.store import opened
    except ImportError as error:
        raise InputError(
            f"the service needs {error.name}: pip install 'stagewright[service]'"
        ) from None
    webhooks = None
    if given.webhook_origin:
        webhooks = Webhooks(tuple(given.webhook_origin), os.environ.get(SECRET, ""))
    with opened(store_url(given.store)) as jobs, _processes(given) as start:
        server = Server(
            jobs, given.host, given.port, given.workers, limit, given.rate, webhooks, start,
            given.keep_days,
        )  # fmt: skip
        server.require_safe()
        server.run(lambda url: print_lines(f"serving at {url}"))
    return 0


def _processes(given: ServeOptions) -> "AbstractContextManager[Start]":
    """What starts the processes of jobs."""
    if given.engine == "ray":
        from stagewright.service.workers.ray_processes import on_ray

        return on_ray(given.address)
    from stagewright.service.workers.processes import LocalProcess

    return contextlib.nullcontext(LocalProcess)


def store_url(text: str) -> str:
    """The URL of a store: a file is one of SQLite."""
    return text if "://" in text else f"sqlite:///{Path(text).absolute()}"


class TokenOptions(Stored, Printed):
    """What ``token`` is asked."""

    user: Annotated[str, Option("USER")]
    """Whose token."""
    scope: str = "submit"
    """read, submit or admin."""
    revoke: bool = False
    """Delete all tokens of the user instead."""


def token(given: TokenOptions) -> int:
    """Make a token of the planning service; it is shown once."""
    from stagewright.service.http.tokens import Scope, Tokens
    from stagewright.service.jobs.store import opened

    scope, as_json = given.scope, given.as_json
    with contextlib.suppress(ValueError):
        scope = Scope(scope)
    if not isinstance(scope, Scope):
        raise InputError(f"--scope {scope!r} must be one of {', '.join(Scope)}")
    with opened(store_url(given.store)) as jobs:
        tokens = Tokens(jobs.engine)
        if given.revoke:
            count = tokens.revoke(given.user)
            print_json({"revoked": count}) if as_json else print_lines(f"{count} tokens deleted")
            return 0 if count else 1
        made = tokens.create(given.user, scope)
    print_json({"token": made}) if as_json else print_lines(made)
    return 0


class BackupOptions(Stored):
    """What ``backup`` is asked."""

    file: Annotated[Path, Option("FILE"), Writes()]
    """The new file."""


def backup(given: BackupOptions) -> int:
    """Copy a store of SQLite into a new file while servers work on it.

    The file is a store too: put it in place of the other one, with no server running, to restore.
    A store of PostgreSQL is backed up with pg_dump.
    """
    from stagewright.service.jobs.backups import back_up

    back_up(store_url(given.store), given.file)
    print_lines(f"{given.file}: {given.file.stat().st_size} bytes")
    return 0
