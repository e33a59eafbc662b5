"""Where commands have their answers from: this process, or the planning service at ``--server``."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import typer

from stagewright.cli import interruptible
from stagewright.cli.console import progress, warn
from stagewright.cli.options import OnRay
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.client import Client
    from stagewright.formulations.forms.answers import OnProgress, StopToken
    from stagewright.service import engines
    from stagewright.service.answers import Answer
    from stagewright.service.requests import Request

A = TypeVar("A", bound="Answer")

TOKEN = "STAGEWRIGHT_TOKEN"  # the name of an environment variable
_UNAUTHORIZED = 401
NO_ANSWER = 1  # exit code, as of a search that found nothing in time


def find(kind: type[A], request: "Request", task: str, server: str | None) -> A:
    """The answer, of that type, with progress shown as that of ``task``; Ctrl-C ends the search."""
    with interruptible() as stop, progress(task, stop) as on_progress:
        return answer_of(kind, request, server, on_progress, stop)


def answer_of(
    kind: type[A],
    request: "Request",
    server: str | None,
    on_progress: "OnProgress",
    stop: "StopToken",
    job_kind: str | None = None,
) -> A:
    """The answer, of that type, from this process or the service at ``server``.

    ``job_kind`` is that of the request by default.
    """
    from stagewright.service.jobs.kinds import KINDS, kind_of

    if server is None:
        found = KINDS[job_kind or kind_of(request)].answer(request, on_progress, stop)
    else:
        with serving(server) as client:
            found = client.solve(request, on_progress, stop, job_kind)
    assert isinstance(found, kind)
    return found


def planning_engine(given: OnRay, threads: int) -> "engines.Engine":
    """Where several plans are made: one by one in this process, or on Ray at the same time."""
    from stagewright.service import engines

    if given.engine == "local":
        return engines.HERE
    return engines.Engine("ray", address=given.address, cpus=threads)


@contextmanager
def serving(server: str) -> "Iterator[Client]":
    """A client of the service; what it says of errors is one line with its address."""
    import httpx

    from stagewright.client import Client, ServiceError, UnansweredError

    try:
        with Client(server, os.environ.get(TOKEN)) as client:
            yield client
    except ServiceError as error:
        hint = f"; a token is read from {TOKEN}" if error.status == _UNAUTHORIZED else ""
        raise InputError(f"--server {server}: {error}{hint}") from None
    except UnansweredError as error:
        if error.job.stopped_by not in ("user", "time"):
            raise
        warn(f"no answer: {error}")
        raise typer.Exit(NO_ANSWER) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"--server {server}: no service answers there: {error}") from None
