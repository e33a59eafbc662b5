"""``serve``, ``token`` and ``backup``: the planning service and its store."""

import contextlib
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from stagewright.cli.commands import CommandOptions, command
from stagewright.cli.console import print_json, print_table, say
from stagewright.cli.options import OnRay, Printed
from stagewright.cli.outputs import Writes
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    is_finite,
    parse_bytes,
    parse_duration,
)
from stagewright.service.options import Option

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from stagewright.service.http.tokens import Tokens
    from stagewright.service.workers.processes import Start

_LEAST_MEMORY = 100e6  # bytes; a process that only starts takes more
_LONGEST_TOKEN = 36500 * 86400.0  # seconds


class Stored(CommandOptions):
    """Where jobs are kept."""

    store: Annotated[str, Option(form="FILE_OR_URL", env="STAGEWRIGHT_STORE")] = (
        "stagewright-jobs.sqlite"
    )
    """A file of SQLite, or an SQLAlchemy URL of PostgreSQL
    (postgresql+psycopg://USER:PASSWORD@HOST/NAME)."""


class Audited(CommandOptions):
    """Where the audit log is kept."""

    audit_log: Annotated[Path | None, Option(form="FILE", env="STAGEWRIGHT_AUDIT_LOG")] = None
    """Append who changed what, made or revoked tokens, or was refused: a line of JSON each."""


class ServeOptions(Stored, Audited, OnRay):
    """What ``serve`` is asked."""

    host: str = "127.0.0.1"
    """Address to listen at."""
    port: Annotated[int, Field(ge=0), Field(le=65535)] = 8754
    """Port to listen at; 0: a free one."""
    workers: Annotated[int, Option(form="N"), Field(ge=0)] = 1
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
    log_format: Literal["text", "json"] | None = None
    """Write a line for each request and each event of a job on stderr; default: for errors."""
    drain: Annotated[str, Option(form="SECONDS")] = "25s"
    """How long running jobs may go on at SIGTERM, before they are queued again."""
    trusted_proxy: Annotated[list[str] | None, Option(form="NETWORK")] = None
    """The address of a proxy, or a network of nothing but proxies, e.g. 10.0.0.2: X-Forwarded-For
    and X-Forwarded-Proto count from there alone; repeat it for several."""
    identity_header: Annotated[str | None, Option(form="NAME")] = None
    """The header in which a trusted proxy names the user who signed in, e.g. X-Forwarded-User."""
    admin: Annotated[list[str] | None, Option(form="USER")] = None
    """A user so named who administrates; the others may submit. Repeat it for several."""
    root_path: Annotated[str, Option(form="PATH")] = ""
    """The prefix under which a proxy serves this service, e.g. /planner."""
    weight: Annotated[list[str] | None, Option(form="USER=N")] = None
    """Give the user N times the share of others, from now on, on all servers of the store; repeat
    it for several."""
    user_running: Annotated[int | None, Option(form="N"), Field(ge=1)] = None
    """Jobs of a user that run at a time; more wait. Default: any number."""
    user_queued: Annotated[int | None, Option(form="N"), Field(ge=1)] = None
    """Jobs of a user in the queue; default: 1000 if there are tokens, else any number."""
    user_queued_time: Annotated[str | None, Option(form="SECONDS")] = None
    """Time limits, added up, of a user's jobs in the queue, for example 10h; default: any."""
    preempt_after: Annotated[str, Option(form="SECONDS")] = "60s"
    """A job with a plan that has run for so long gives way to one without, of a user below their
    share, and goes on later; never: it does not."""


@command(
    headings={
        "Behind a proxy": "trusted_proxy identity_header admin root_path",
        "Logs": "log_format audit_log",
        "Shares of users": "weight user_running user_queued user_queued_time preempt_after",
    }
)
def serve(given: ServeOptions) -> int:
    """Serve plans over HTTP, and solve the jobs in processes of their own.

    On an address of this machine alone no token is needed as long as there is none; on any other it
    starts only if there are tokens.
    """
    limit = parse_bytes(given.memory_limit, "--memory-limit")
    if limit < _LEAST_MEMORY:
        raise InputError(f"--memory-limit must be at least 100MB, got {given.memory_limit}")
    drain = parse_duration(given.drain, "--drain")
    for name, value, unit in (
        ("rate", given.rate, "requests a second"),
        ("keep-days", given.keep_days, "days"),
    ):
        if value is not None and not (is_finite(value) and value > 0):
            raise InputError(f"--{name} must be more than 0 {unit}, got {value:g}")
    weights = dict(_weight(one) for one in given.weight or ())
    after, time = given.preempt_after, given.user_queued_time
    preempt = None if after == "never" else parse_duration(after, "--preempt-after")
    queued_seconds = None if time is None else parse_duration(time, "--user-queued-time")
    given.require()
    try:
        from stagewright.service import tracing
        from stagewright.service.http.audit import audited
        from stagewright.service.http.identity import Proxies, networks
        from stagewright.service.http.server import Server
        from stagewright.service.http.webhooks import SECRET, Webhooks
        from stagewright.service.jobs.queue import QueueRules
        from stagewright.service.jobs.store import opened
        from stagewright.service.tracing import log, watch_store
    except ImportError as error:
        raise InputError(
            f"the service needs {error.name}: pip install 'stagewright[service]'"
        ) from None
    if given.log_format is not None:
        log(given.log_format == "json")
    tracing.start()
    proxies = Proxies(
        networks(given.trusted_proxy or ()), given.identity_header, frozenset(given.admin or ()),
        given.root_path.rstrip("/"),
    )  # fmt: skip
    webhooks = None
    if given.webhook_origin:
        webhooks = Webhooks(tuple(given.webhook_origin), os.environ.get(SECRET, ""))
    with (
        audited(given.audit_log),
        opened(_store_url(given.store)) as jobs,
        _processes(given) as start,
    ):
        server = Server(
            jobs, given.host, given.port, given.workers, limit, given.rate, webhooks, start,
            given.keep_days, drain, proxies, given.user_queued, queued_seconds,
            QueueRules(given.user_running, preempt),
        )  # fmt: skip
        watch_store(jobs.engine)
        server.require_safe()
        for user, weight in weights.items():
            jobs.weigh(user, weight)
        server.run(lambda url: say(f"serving at {url}"))
    return 0


def _weight(text: str) -> tuple[str, float]:
    """A user and their weight, ``ann=2``."""
    user, _, number = text.rpartition("=")
    with contextlib.suppress(ValueError):
        weight = float(number)
        if user and 1e-3 <= weight <= 1e3:
            return user, weight
    raise InputError(f"--weight {text!r} must be USER=N with N from 0.001 to 1000, such as ann=2")


def _processes(given: ServeOptions) -> "AbstractContextManager[Start]":
    """What starts the processes of jobs: this machine, or a Ray cluster."""
    if given.engine == "ray":
        from stagewright.service.workers.processes import on_ray

        return on_ray(given.address)
    from stagewright.service.workers.processes import LocalProcess

    return contextlib.nullcontext(LocalProcess)


def _store_url(text: str) -> str:
    """The URL of a store of jobs; a file name becomes one of SQLite."""
    return text if "://" in text else f"sqlite:///{Path(text).absolute()}"


class TokenOptions(Stored, Audited, Printed):
    """What ``token`` is asked."""

    user: Annotated[str | None, Option("USER")] = None
    """Whose token."""
    scope: str = "submit"
    """read, submit or admin."""
    expires: Annotated[str | None, Option(form="DURATION")] = None
    """How long it is valid, for example 90d; default: until it is revoked."""
    listed: Annotated[bool, Option("--list")] = False
    """List the tokens instead, of the user if one is named."""
    revoke: bool = False
    """Delete all tokens of the user instead, or the one that --id names."""
    id: Annotated[str | None, Option("--id", form="ID")] = None
    """With --revoke: the id of a token, as --list has it."""


def token(given: TokenOptions) -> int:
    """Make a token of the planning service, which is shown once; list them, or revoke some.

    What is revoked or expires is refused at once, and ends streams of events within seconds.
    """
    from stagewright.service.http.audit import audited
    from stagewright.service.http.tokens import Scope, Tokens, id_of
    from stagewright.service.jobs.store import opened

    _require_one_thing(given)
    if given.scope not in set(Scope):
        raise InputError(f"--scope {given.scope!r} must be one of {', '.join(Scope)}")
    seconds = None if given.expires is None else parse_duration(given.expires, "--expires")
    if seconds is not None and not 0 < seconds <= _LONGEST_TOKEN:
        raise InputError(f"--expires must be more than 0 and at most 36500d, got {given.expires}")
    with audited(given.audit_log), opened(_store_url(given.store)) as jobs:
        tokens = Tokens(jobs.engine)
        if given.listed:
            return _list_tokens(tokens, given)
        if given.revoke:
            return _revoke(tokens, given)
        assert given.user is not None
        made = tokens.create(given.user, Scope(given.scope), seconds)
        _audit("token made", id_of(made), given.user)
    print_json({"token": made, "id": id_of(made)}) if given.as_json else say(made)
    return 0


def _require_one_thing(given: TokenOptions) -> None:
    """Refuse options of ``token`` that do not go together."""
    if given.listed and given.revoke:
        raise InputError("--list or --revoke: give one of them")
    if given.id is not None and not given.revoke:
        raise InputError("--id goes with --revoke")
    if given.revoke and (given.user is None) == (given.id is None):
        raise InputError("--revoke needs either USER, whose tokens are deleted, or --id ID")
    if given.user is None and not (given.listed or given.revoke):
        raise InputError("USER is missing: whose token is made")


def _list_tokens(tokens: "Tokens", given: TokenOptions) -> int:
    found = [one for one in tokens.all() if given.user in (None, one.user)]
    if given.as_json:
        from dataclasses import asdict

        print_json({"tokens": [asdict(one) for one in found]})
    elif not found:
        say("there are no tokens")
    else:
        rows = [
            (one.id, one.user, one.scope, *map(_date, (one.created, one.expires, one.used)))
            for one in found
        ]
        print_table(("<id", "<user", "<scope", "<created (UTC)", "<expires", "<last used"), rows)
    return 0


def _date(at: float | None) -> str:
    return "-" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}"


def _revoke(tokens: "Tokens", given: TokenOptions) -> int:
    found = tokens.revoke(given.user, given.id)
    for one in found:
        _audit("token revoked", one.id, one.user)
    told = "1 token" if len(found) == 1 else f"{len(found)} tokens"
    print_json({"revoked": len(found)}) if given.as_json else say(f"{told} deleted")
    return 0 if found else 1


def _audit(event: str, token: str, user: str) -> None:
    """Note what this command did to a token, and who of this machine ran it."""
    import getpass

    from stagewright.service.http.audit import WHAT
    from stagewright.service.tracing import note

    note(WHAT, event=event, by=getpass.getuser(), made=token, of=user)


class BackupOptions(Stored):
    """What ``backup`` is asked."""

    file: Annotated[Path, Option("FILE"), Writes()]
    """The new file."""


def backup(given: BackupOptions) -> int:
    """Copy a store of SQLite into a new file while servers work on it.

    The file is a store too: put it in place of the other one, with no server running, to restore.
    A store of PostgreSQL is backed up with pg_dump.
    """
    from stagewright.service.jobs.upkeep import back_up

    back_up(_store_url(given.store), given.file)
    say(f"{given.file}: {given.file.stat().st_size} bytes")
    return 0
