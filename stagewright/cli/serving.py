"""``serve``, ``token`` and ``backup``: the planning service."""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.console import (
    Engine,
    EngineName,
    JsonFlag,
    RayAddress,
    print_json,
    print_lines,
    require_ray,
)
from stagewright.cli.outputs import Writes
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stagewright.service.workers.processes import Start

LEAST_MEMORY = 100e6  # bytes; a process that only starts takes more

StoreUrl = Annotated[
    str,
    typer.Option(
        "--store",
        help="A file of SQLite, or an SQLAlchemy URL of PostgreSQL "
        "(postgresql+psycopg://USER:PASSWORD@HOST/NAME).",
        metavar="FILE_OR_URL",
        envvar="STAGEWRIGHT_STORE",
    ),
]


def serve(
    store: StoreUrl = "stagewright-jobs.sqlite",
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen at; 0: a free one.", min=0, max=65535)
    ] = 8754,
    workers: Annotated[
        int,
        typer.Option(
            help="Jobs that are solved at a time; 0: other servers' workers do.",
            metavar="N",
            min=0,
        ),
    ] = 1,
    memory_limit: Annotated[
        str, typer.Option("--memory-limit", help="Memory that a job may take, for example 8GB.")
    ] = "8GB",
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests a second of each user, ten times as many at once; default: 50 if there "
            "are tokens, else any number.",
            metavar="N",
        ),
    ] = None,
    webhook_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Tell of the ends of jobs there, for example https://example.com; repeat it for "
            "several. STAGEWRIGHT_WEBHOOK_SECRET signs what is told.",
            metavar="URL",
        ),
    ] = None,
    keep_days: Annotated[
        float | None,
        typer.Option(
            help="Delete jobs so many days after their ends; default: never.", metavar="N"
        ),
    ] = None,
    engine: EngineName = Engine.LOCAL,
    address: RayAddress = None,
) -> int:
    """Serve plans over HTTP, and solve the jobs in processes of their own.

    On an address of this machine alone no token is needed as long as there is none; on any other it
    starts only if there are tokens.
    """
    from stagewright.graphs.documents.units import is_finite, parse_bytes

    limit = parse_bytes(memory_limit, "--memory-limit")
    if limit < LEAST_MEMORY:
        raise InputError(f"--memory-limit must be at least 100MB, got {memory_limit}")
    for name, given, unit in (
        ("rate", rate, "requests a second"),
        ("keep-days", keep_days, "days"),
    ):
        if given is not None and not (is_finite(given) and given > 0):
            raise InputError(f"--{name} must be more than 0 {unit}, got {given:g}")
    require_ray(engine, address)
    try:
        from stagewright.service.http.server import Server
        from stagewright.service.http.webhooks import SECRET, Webhooks
        from stagewright.service.jobs.store import opened
    except ImportError as error:
        raise InputError(
            f"the service needs {error.name}: pip install 'stagewright[service]'"
        ) from None
    webhooks = None
    if webhook_origin:
        webhooks = Webhooks(tuple(webhook_origin), os.environ.get(SECRET, ""))
    with opened(store_url(store)) as jobs, _processes(engine, address) as start:
        server = Server(jobs, host, port, workers, limit, rate, webhooks, start, keep_days)
        server.require_safe()
        server.run(lambda url: print_lines(f"serving at {url}"))
    return 0


def _processes(engine: Engine, address: str | None) -> "AbstractContextManager[Start]":
    """What starts the processes of jobs."""
    if engine is Engine.RAY:
        from stagewright.service.workers.ray_processes import on_ray

        return on_ray(address)
    from stagewright.service.workers.processes import LocalProcess

    return contextlib.nullcontext(LocalProcess)


def store_url(text: str) -> str:
    """The URL of a store: a file is one of SQLite."""
    return text if "://" in text else f"sqlite:///{Path(text).absolute()}"


def token(
    user: Annotated[str, typer.Argument(help="Whose token.", metavar="USER", show_default=False)],
    scope: Annotated[str, typer.Option(help="read, submit or admin.")] = "submit",
    revoke: Annotated[
        bool, typer.Option("--revoke", help="Delete all tokens of the user instead.")
    ] = False,
    store: StoreUrl = "stagewright-jobs.sqlite",
    as_json: JsonFlag = False,
) -> int:
    """Make a token of the planning service; it is shown once."""
    from stagewright.service.http.tokens import Scope, Tokens
    from stagewright.service.jobs.store import opened

    with contextlib.suppress(ValueError):
        scope = Scope(scope)
    if not isinstance(scope, Scope):
        raise InputError(f"--scope {scope!r} must be one of {', '.join(Scope)}")
    with opened(store_url(store)) as jobs:
        tokens = Tokens(jobs.engine)
        if revoke:
            count = tokens.revoke(user)
            print_json({"revoked": count}) if as_json else print_lines(f"{count} tokens deleted")
            return 0 if count else 1
        made = tokens.create(user, scope)
    print_json({"token": made}) if as_json else print_lines(made)
    return 0


def backup(
    file: Annotated[Path, typer.Argument(help="The new file.", metavar="FILE"), Writes()],
    store: StoreUrl = "stagewright-jobs.sqlite",
) -> int:
    """Copy a store of SQLite into a new file while servers work on it.

    The file is a store too: put it in place of the other one, with no server running, to restore.
    A store of PostgreSQL is backed up with pg_dump.
    """
    from stagewright.service.jobs.backups import back_up

    back_up(store_url(store), file)
    print_lines(f"{file}: {file.stat().st_size} bytes")
    return 0
