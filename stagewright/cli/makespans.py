"""``jobshop``, and what it shares with ``schedule``: problems given by times, without a model."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from stagewright.cli.console import (
    DEFAULT_THREADS,
    JsonFlag,
    Seed,
    Threads,
    TimeLimit,
    ask,
    percent,
    print_answer,
    print_lines,
    print_table,
    progress,
    read_limits,
)
from stagewright.cli.interrupts import interruptible

if TYPE_CHECKING:
    from stagewright.formulations.forms.answers import OnProgress, StopToken
    from stagewright.service.pipeline_answers import JobShopAnswer


A = TypeVar("A")
T = TypeVar("T")
Backend = Annotated[
    str | None,
    typer.Option("--backend", help="Solver; default: cp-sat.", metavar="NAME"),
]


def jobshop(
    file: Annotated[Path, typer.Argument(help="An instance in the text format of the literature.")],
    time_limit: TimeLimit = 10.0,
    threads: Threads = DEFAULT_THREADS,
    seed: Seed = 0,
    backend: Backend = None,
    as_json: JsonFlag = False,
) -> int:
    """Solve a job shop: minimise the makespan of jobs that visit machines in given orders."""
    from stagewright.formulations.pipelines.jobshop import parse_jobshop
    from stagewright.graphs.documents.documents import read_text
    from stagewright.service.pipeline_requests import JobShopRequest
    from stagewright.service.scheduling import jobshop as answer_of

    request = ask(
        JobShopRequest,
        **limit_fields(time_limit, threads, seed),
        jobs=parse_jobshop(read_text(file), str(file)).jobs,
        backend=backend,
    )
    answer = find(answer_of, request, f"scheduling {file.name}")
    if as_json:
        print_answer(answer)
    else:
        _print_jobshop(file.name, answer)
    return 1 if answer.starts is None else 0


def limit_fields(seconds: float, threads: int, seed: int) -> dict[str, Any]:
    """The fields of a request."""
    limits = read_limits(seconds, threads, seed)
    return {"time_limit": limits.seconds, "threads": limits.threads, "seed": limits.seed}


def find(answer_of: Callable[[T, "OnProgress", "StopToken"], A], request: T, task: str) -> A:
    """The answer, with progress shown as that of ``task``; Ctrl-C ends the search."""
    with interruptible() as stop, progress(task, stop) as on_progress:
        return answer_of(request, on_progress, stop)


def _print_jobshop(name: str, answer: "JobShopAnswer") -> None:
    found = "no answer" if answer.makespan is None else f"makespan {answer.makespan}"
    print_lines(
        f"{name}: {answer.jobs} jobs on {answer.machines} machines",
        f"{found} ({answer.status}), bound {answer.bound} by {answer.proved_by}, "
        f"gap {percent(answer.gap)}, {answer.wall_seconds:.2f} s",
    )
    rows = [(str(j), " ".join(map(str, row))) for j, row in enumerate(answer.starts or ())]
    if rows:
        print_table(("job", "<starts of its steps"), rows)
