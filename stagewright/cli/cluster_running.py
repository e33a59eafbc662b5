"""``run-cluster``: train the jobs of a workload in rounds on a Ray cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stagewright.cli.commands import Asked, command
from stagewright.cli.common import Written, tell
from stagewright.cli.console import print_lines, print_table
from stagewright.cli.interrupts import interruptible
from stagewright.cli.outputs import Writes
from stagewright.graphs.documents.documents import to_json, write_text
from stagewright.graphs.documents.errors import InputError
from stagewright.service.cluster_requests import RunClusterRequest
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.service.cluster_answers import RunClusterAnswer


class RunClusterOptions(Written):
    """What ``run-cluster`` is asked beside its request."""

    program: Annotated[list[str], Option(form="[MODEL=]PACKAGE:FUNCTION")]
    """Function that trains a job under a lease, of any model or of MODEL; repeatable."""
    folder: Annotated[Path, Option(form="DIR"), Writes(several=True)]
    """Checkpoints and the job store, shared by all nodes; a stopped run continues from it."""


@command(
    headings={"When jobs fail": "grace_seconds patience_seconds retries feedback", "Ray": "address"}
)
def run_cluster(asked: Asked[RunClusterRequest], given: RunClusterOptions) -> int:
    """Train the jobs of a workload in rounds on Ray; exit code 1 if one failed or still waits.

    After Ctrl-C (or SIGTERM) all jobs save checkpoints and end; the same command continues them.
    The exit code is then 0 if a job has made a step and none has failed. A second Ctrl-C ends
    immediately.
    """
    request = asked.request(folder=str(given.folder))
    programs = _programs(given.program, {job.model for job in request.workload.jobs})
    from stagewright.service.cluster_running import run_cluster as answer_of

    with interruptible() as stop:
        answer = answer_of(request, programs, stop)
    if given.output is not None:
        write_text(given.output, to_json(answer.report))
    tell(answer, given, _print, [given.output])
    progressed = answer.status == "interrupted" and any(job.steps for job in answer.jobs)
    return 0 if answer.status == "done" or progressed else 1


def _programs(texts: list[str], models: set[str]) -> dict[str, Callable[..., Any]]:
    """The program of each model; a program without a model trains all models without one."""
    from stagewright.cli.factories import load_factory

    found: dict[str, Callable[..., Any]] = {}
    rest: list[Callable[..., Any]] = []
    for text in texts:
        model, equals, name = text.rpartition("=")
        loaded = load_factory(name, "--program")
        if not equals:
            rest.append(loaded)
        elif model not in models:
            raise InputError(f"--program {text}: no job is of model {model!r}")
        elif model in found:
            raise InputError(f"--program {text}: {model!r} has a program already")
        else:
            found[model] = loaded
    if len(rest) > 1:
        raise InputError("--program: only one program can be without a model")
    return dict.fromkeys(models, rest[0]) | found if rest else found


def _print(answer: "RunClusterAnswer") -> None:
    print_table(
        ("<job", "<state", "steps", "seconds", "<error"),
        [
            (
                job.name, job.state, str(job.steps),
                "-" if job.completion_seconds is None else f"{job.completion_seconds:.1f}",
                job.error or "",
            )
            for job in answer.jobs
        ],
    )  # fmt: skip
    print_table(
        ("<job", "<accelerator", "planned", "measured"),
        [
            (one.job, one.worker, f"{one.target:.3f}", f"{one.measured:.3f}")
            for one in answer.shares
        ],
    )
    print_lines(f"{answer.policy}: {answer.status} after {answer.rounds} rounds")
