"""``jobs``: the jobs of a planning service, and their answers."""

from typing import TYPE_CHECKING, Annotated

from stagewright.cli.common import Served, Written
from stagewright.cli.console import percent, print_answer, print_json, print_lines, print_table
from stagewright.cli.solving import serving
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_seconds
from stagewright.service.options import Option

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stagewright.client import Client, JobState

HEAD = ("<job", "<kind", "<user", "<state", "cost", "bound", "gap")


class JobsOptions(Served, Written):
    """What ``jobs`` is asked."""

    job: Annotated[str | None, Option("JOB")] = None
    """A job; default: the newest ones."""
    stop: bool = False
    """End the job with its best answer so far."""


def jobs(given: JobsOptions) -> int:
    """List jobs of a planning service, show one, stop it, or fetch its answer.

    --output writes the best plan so far; --json prints the answer once the job has ended. Exit code
    1 if the job has ended without an answer.
    """
    job, output = given.job, given.output
    if given.server is None:
        raise InputError("--server URL is missing: the planning service whose jobs they are")
    if job is None and (given.stop or output is not None):
        raise InputError(f"{'--stop' if given.stop else '--output'} is of one job: name it")
    with serving(given.server) as client:
        if job is None:
            return _list(client, given.as_json)
        if given.stop:
            client.stop(job)
            client.wait(job)
        return _show(client, client.job(job), output, given.as_json)


def _list(client: "Client", as_json: bool) -> int:
    from dataclasses import asdict

    found = client.jobs()
    if as_json:
        print_json({"jobs": [asdict(one) for one in found]})
        return 0
    _print(found)
    return 0


def _print(found: "Sequence[JobState]") -> None:
    """A table of jobs; costs have a unit, which a line names where it is that of the request."""
    print_table(HEAD, [_row(one) for one in found])
    if any(one.cost is not None and not _is_timed(one) for one in found):
        print_lines("units: those of the request's times or memory")


def _row(one: "JobState") -> tuple[str, ...]:
    cost, bound = (_amount(one, value) for value in (one.cost, one.bound))
    return one.id, one.kind, one.user, one.state, cost, bound, percent(one.gap)


def _amount(one: "JobState", value: float | None) -> str:
    """A cost or bound of a job with its unit."""
    if value is None:
        return "-"
    return format_seconds(value) if _is_timed(one) else f"{value:.6g} units"


def _is_timed(one: "JobState") -> bool:
    from stagewright.service.jobs.kinds import KINDS

    return one.kind in KINDS and KINDS[one.kind].timed


def _webhook(found: "JobState") -> str:
    """What became of the job's webhook."""
    told = found.webhook
    if told is None:
        return ""
    tried = f" after {told.attempts} attempts" if told.attempts > 1 else ""
    return f"webhook {told.state}{tried}" + (f": {told.reason}" if told.reason else "")


def _save(client: "Client", found: "JobState", output: "Path") -> None:
    """Write the best plan of a job: one of operators is in its answer."""
    from stagewright.formulations.operators.plan import save_operator_plan
    from stagewright.formulations.plans.plan import save_plan
    from stagewright.service.operator_plans import PlaceAnswer

    answer = client.answer(found.id) if found.kind == "place" else None
    if isinstance(answer, PlaceAnswer) and answer.plan is not None:
        save_operator_plan(answer.plan, output)
    else:
        save_plan(client.document(found.id), output)


def _show(client: "Client", found: "JobState", output: "Path | None", as_json: bool) -> int:
    if output is not None:
        _save(client, found, output)
    if as_json:
        print_answer(client.answer(found.id))
        return 0
    _print([found])
    by = "" if found.stopped_by is None else f"stopped by {found.stopped_by}"
    print_lines(*(line for line in (by, found.reason, _webhook(found)) if line))
    print_lines(*([f"{output} is written"] if output is not None else []))
    return 1 if found.state == "failed" else 0
