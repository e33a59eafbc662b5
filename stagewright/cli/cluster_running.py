"""``run-cluster``: train the jobs of a workload in rounds on a Ray cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.allocating import (
    SPELLED,
    Accelerators,
    Budget,
    JobsFile,
    PlacementSensitive,
    PolicyName,
    SpaceSharing,
    read_jobs,
)
from stagewright.cli.console import (
    JsonFlag,
    OutputFile,
    ask,
    print_answer,
    print_lines,
    print_table,
)
from stagewright.cli.interrupts import interruptible
from stagewright.cli.outputs import Writes
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.service.cluster_answers import RunClusterAnswer


def run_cluster(
    jobs: JobsFile,
    cluster: Accelerators,
    program: Annotated[
        list[str],
        typer.Option(
            help="Function that trains a job under a lease, of any model or of MODEL; repeatable.",
            metavar="[MODEL=]PACKAGE:FUNCTION",
        ),
    ],
    folder: Annotated[
        Path,
        typer.Option(
            help="Checkpoints and the job store, shared by all nodes; a stopped run continues "
            "from it.",
            metavar="DIR",
        ),
        Writes(several=True),
    ],
    policy: PolicyName = "max-min",
    space_sharing: SpaceSharing = False,
    placement_sensitive: PlacementSensitive = False,
    budget: Budget = None,
    round_seconds: Annotated[
        float, typer.Option(help="Length of a round; several steps of every job should fit.")
    ] = 360.0,
    grace_seconds: Annotated[
        float, typer.Option(help="How long a process may exceed its lease before it is killed.")
    ] = 60.0,
    patience_seconds: Annotated[
        float, typer.Option(help="How long to wait for accelerators when no job can run.")
    ] = 600.0,
    retries: Annotated[
        int, typer.Option(help="How often a job may fail between two checkpoints.")
    ] = 3,
    feedback: Annotated[
        float,
        typer.Option(help="Weight of measured rates against those of the jobs file, 0 to 1."),
    ] = 0.0,
    address: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster; default: Ray is started on this machine."),
    ] = None,
    output: OutputFile = None,
    as_json: JsonFlag = False,
) -> int:
    """Train the jobs of a workload in rounds on Ray; exit code 1 if one failed or still waits.

    After Ctrl-C (or SIGTERM) all jobs save checkpoints and end; the same command continues them.
    The exit code is then 0 if a job has made a step and none has failed. A second Ctrl-C ends
    immediately.
    """
    from stagewright.graphs.documents.documents import to_json, write_text
    from stagewright.service.cluster_requests import RunClusterRequest

    request = ask(
        RunClusterRequest,
        SPELLED,
        **read_jobs(jobs, cluster),
        folder=str(folder),
        policy=policy,
        space_sharing=space_sharing,
        placement=placement_sensitive,
        budget_dollars=budget,
        round_seconds=round_seconds,
        grace_seconds=grace_seconds,
        patience_seconds=patience_seconds,
        retries=retries,
        feedback=feedback,
        address=address,
    )
    programs = _programs(program, {job.model for job in request.workload.jobs})
    from stagewright.service.cluster_running import run_cluster as answer_of

    with interruptible() as stop:
        answer = answer_of(request, programs, stop)
    if output is not None:
        write_text(output, to_json(answer.report))
    if as_json:
        print_answer(answer)
    else:
        _print(answer)
        print_lines(*([f"{output} is written"] if output is not None else []))
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
