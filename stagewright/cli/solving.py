"""Where commands have their answers from: this process, or a planning service; and its jobs."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from stagewright.cli import interruptible
from stagewright.cli.console import (
    percent,
    print_answer,
    print_json,
    print_table,
    progress,
    say,
    warn,
)
from stagewright.cli.options import OnRay, Served, Written
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_seconds
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.client import Client, JobState
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


HEAD = ("<job", "<kind", "<user", "<state", "cost", "bound", "gap")


class JobsOptions(Served, Written):
    """What ``jobs`` is asked."""

    job: Annotated[str | None, Option("JOB")] = None
    """A job; default: the newest ones."""
    stop: bool = False
    """End the job with its best answer so far."""
    retry: bool = False
    """Solve the job again, if it failed or was stopped."""
    fresh: bool = False
    """With --retry: whatever it has found, and without it."""


def jobs(given: JobsOptions) -> int:
    """List jobs of a planning service, show one, stop it, try it again, or fetch its answer.

    --output writes the best plan so far; --json prints the answer once the job has ended. Exit code
    1 if the job has ended without an answer.
    """
    job, output = given.job, given.output
    if given.server is None:
        raise InputError("--server URL is missing: the planning service whose jobs they are")
    asked = {"--stop": given.stop, "--retry": given.retry, "--output": output is not None}
    if job is None and any(asked.values()):
        raise InputError(f"{next(name for name in asked if asked[name])} is of one job: name it")
    if given.fresh and not given.retry:
        raise InputError("--fresh goes with --retry")
    with serving(given.server) as client:
        if job is None:
            return _list(client, given.as_json)
        if given.stop:
            client.stop(job)
            client.wait(job)
        if given.retry:
            client.retry(job, fresh=given.fresh)
        return _show(client, client.job(job), output, given.as_json)


def _list(client: "Client", as_json: bool) -> int:
    from dataclasses import asdict

    found = client.jobs()
    if as_json:
        print_json({"jobs": [asdict(one) for one in found]})
        return 0
    _print(found, *["waits"][: any(one.waits for one in found)])
    return 0


def _print(found: "Sequence[JobState]", *more: str) -> None:
    """Print a table of jobs, ``more`` of each, and a line about units that are not seconds."""
    print_table((*HEAD, *(f"<{one}" for one in more)), [_row(one, more) for one in found])
    if any(one.cost is not None and not _is_timed(one) for one in found):
        say("units: those of the request's times or memory")


def _row(one: "JobState", more: "Sequence[str]" = ()) -> tuple[str, ...]:
    cost, bound = (_amount(one, value) for value in (one.cost, one.bound))
    told = (getattr(one, name) for name in more)
    return one.id, one.kind, one.user, one.state, cost, bound, percent(one.gap), *told


def _amount(one: "JobState", value: float | None) -> str:
    """A cost or bound of a job with its unit."""
    if value is None:
        return "-"
    return format_seconds(value) if _is_timed(one) else f"{value:.6g} units"


def _is_timed(one: "JobState") -> bool:
    from stagewright.service.jobs.kinds import KINDS

    return one.kind in KINDS and KINDS[one.kind].timed


def _webhook(found: "JobState") -> str:
    """How far the delivery of a job's webhook is, in words."""
    told = found.webhook
    if told is None:
        return ""
    tried = f" after {told.attempts} attempts" if told.attempts > 1 else ""
    return f"webhook {told.state}{tried}" + (f": {told.reason}" if told.reason else "")


def _save(client: "Client", found: "JobState", output: "Path") -> None:
    """Write the best plan of a job, or the document that its answer carries."""
    from stagewright.formulations.plans.plan import save_plan
    from stagewright.graphs.documents.documents import write

    answer = client.answer(found.id) if found.has_ended and not found.has_document else None
    carried = getattr(answer, "plan", None) or getattr(answer, "document", None)
    if carried is None:
        save_plan(client.document(found.id), output)
    else:
        write(type(carried), carried, output)


def _show(client: "Client", found: "JobState", output: "Path | None", as_json: bool) -> int:
    if output is not None:
        _save(client, found, output)
    if as_json:
        print_answer(client.answer(found.id))
        return 0
    _print([found])
    by = "" if found.stopped_by is None else f"stopped by {found.stopped_by}"
    say(*(line for line in (by, found.reason, found.waits, _webhook(found)) if line))
    say(*([f"{output} is written"] if output is not None else []))
    return 1 if found.state == "failed" else 0
