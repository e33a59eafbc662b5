"""``jobshop``, and what it shares with ``schedule``: problems given by times, without a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.console import (
    JsonFlag,
    Seed,
    Server,
    Threads,
    TimeLimit,
    ask,
    percent,
    print_answer,
    print_lines,
    print_table,
    read_limits,
)
from stagewright.cli.solving import find

if TYPE_CHECKING:
    from stagewright.service.pipeline_answers import JobShopAnswer


Backend = Annotated[
    str | None,
    typer.Option("--backend", help="Solver; default: cp-sat.", metavar="NAME"),
]


def jobshop(
    file: Annotated[
        Path,
        typer.Argument(
            help="An instance in a text format of the literature: OR-Library's, Taillard's or, of "
            "flexible job shops, .fjs.",
            show_default=False,
        ),
    ],
    instance: Annotated[
        str | None,
        typer.Option(
            help="Of a file with several: ft06, or 1 for Taillard's first.", metavar="NAME"
        ),
    ] = None,
    time_limit: TimeLimit = 10.0,
    threads: Threads = None,
    seed: Seed = 0,
    backend: Backend = None,
    server: Server = None,
    as_json: JsonFlag = False,
) -> int:
    """Solve a job shop: minimise the makespan of jobs that visit machines in given orders.

    In a flexible job shop a step has a choice of machines.
    """
    from stagewright.formulations.pipelines.jobshop_text import parse_jobshop
    from stagewright.graphs.documents.documents import read_text
    from stagewright.service.pipeline_answers import JobShopAnswer
    from stagewright.service.pipeline_requests import JobShopRequest

    request = ask(
        JobShopRequest,
        **limit_fields(time_limit, threads, seed, server),
        jobs=parse_jobshop(read_text(file), str(file), instance).jobs,
        backend=backend,
    )
    answer = find(JobShopAnswer, request, f"scheduling {file.name}", server)
    if as_json:
        print_answer(answer)
    else:
        _print_jobshop(file.name, answer, flexible=request.problem.is_flexible)
    return 1 if answer.starts is None else 0


def limit_fields(
    seconds: float, threads: int | None, seed: int, server: str | None = None
) -> dict[str, Any]:
    """The fields of a request."""
    limits = read_limits(seconds, threads, seed, server)
    return {"time_limit": limits.seconds, "threads": limits.threads, "seed": limits.seed}


def _print_jobshop(name: str, answer: "JobShopAnswer", flexible: bool) -> None:
    found = "no answer" if answer.makespan is None else f"makespan {answer.makespan}"
    print_lines(
        f"{name}: {answer.jobs} jobs on {answer.machines} machines",
        f"{found} ({answer.status}), bound {answer.bound} by {answer.proved_by}, "
        f"gap {percent(answer.gap)}, {answer.wall_seconds:.2f} s",
    )
    steps = zip(answer.starts or (), answer.chosen_machines or (), strict=True)
    rows = [
        (
            str(j),
            " ".join(
                f"{start}@{on}" if flexible else str(start) for start, on in zip(*row, strict=True)
            ),
        )
        for j, row in enumerate(steps)
    ]
    if rows:
        where = "@machine, from 0" if flexible else ""
        print_table(("job", f"<starts of its steps{where}"), rows)
