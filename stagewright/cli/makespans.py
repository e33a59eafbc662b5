"""``schedule`` and ``jobshop``: scheduling problems in plain numbers, without a model."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.console import (
    DEFAULT_THREADS,
    JsonFlag,
    Seed,
    Threads,
    TimeLimit,
    out,
    percent,
    print_json,
    print_lines,
    print_table,
    progress,
    read_limits,
)
from stagewright.graphs.errors import InputError

if TYPE_CHECKING:
    from rich.text import Text

    from stagewright.formulations.makespan import MakespanProblem, Timetable


class Kind(StrEnum):
    """Rules of ``schedule``."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    PE = "pe"
    OPTIMAL = "optimal"


def schedule(
    stages: Annotated[int, typer.Option(help="Number of stages.", metavar="P")],
    microbatches: Annotated[int, typer.Option(help="Number of microbatches.", metavar="M")],
    times: Annotated[
        list[str],
        typer.Option(
            help="Forward and backward time: one pair, or one per stage as '1,2;2,3' or repeated.",
            metavar="F,B",
        ),
    ],
    transfer: Annotated[
        str, typer.Option(help="Transfer time: one, or one per channel.", metavar="C,...")
    ] = "0",
    in_flight: Annotated[
        str | None,
        typer.Option(help="Most microbatches in flight: one, or one per stage.", metavar="N,..."),
    ] = None,
    kind: Annotated[Kind, typer.Option(help="The rule, or the optimum.")] = Kind.OPTIMAL,
    time_limit: TimeLimit = 10.0,
    threads: Threads = DEFAULT_THREADS,
    seed: Seed = 0,
    as_json: JsonFlag = False,
) -> int:
    """Schedule the microbatches of a pipeline whose stages are given by their times."""
    from stagewright.solvers.scheduling import solve_schedule

    limits = read_limits(time_limit, threads, seed)
    problem = _read_makespan(stages, microbatches, times, transfer, in_flight)
    with progress("scheduling") as on_progress:
        result = solve_schedule(problem, kind.value, limits, on_progress)
    document = {
        "status": result.status,
        "kind": kind.value,
        "stages": stages,
        "microbatches": microbatches,
        "makespan": _plain(result.cost),
        "bound": _plain(result.bound),
        "gap": result.gap,
        "proved_by": result.proved_by,
        "wall_seconds": result.seconds,
        "bubble": None,
        "order": None,
        "starts": None,
    }
    if result.timetable is not None:
        document |= _timetable_json(problem, result.timetable)
    if as_json:
        print_json(document)
    else:
        _print_schedule(problem, result.timetable, document)
    return 1 if result.timetable is None else 0


def jobshop(
    file: Annotated[Path, typer.Argument(help="An instance in the text format of the literature.")],
    time_limit: TimeLimit = 10.0,
    threads: Threads = DEFAULT_THREADS,
    seed: Seed = 0,
    as_json: JsonFlag = False,
) -> int:
    """Solve a job shop: jobs visit machines in given orders; the last one ends soonest."""
    return 0


def _read_makespan(
    stages: int, microbatches: int, times: list[str], transfer: str, in_flight: str | None
) -> "MakespanProblem":
    from stagewright.formulations.makespan import MakespanProblem

    if stages < 1:
        raise InputError(f"--stages must be at least 1, got {stages}")
    if microbatches < 1:
        raise InputError(f"--microbatches must be at least 1, got {microbatches}")
    pairs = [
        _numbers("--times", pair) for text in times for pair in text.replace(";", " ").split()
    ]
    for pair in pairs:
        if len(pair) != 2:
            raise InputError(f"--times: {_joined(pair)} is no pair; write forward,backward")
    pairs = _per_place("--times", "pairs", pairs, stages, "stages")
    sends = tuple(_per_place("--transfer", "times", _numbers("--transfer", transfer), stages - 1))
    flights = [float(microbatches)] if in_flight is None else _numbers("--in-flight", in_flight)
    for limit in flights:
        if not (limit.is_integer() and limit >= 1):
            raise InputError(f"--in-flight must be whole numbers from 1, got {limit:g}")
    return MakespanProblem(
        microbatches,
        tuple(forward for forward, _ in pairs),
        tuple(backward for _, backward in pairs),
        sends,
        sends,
        (0.0,) * stages,
        tuple(int(limit) for limit in _per_place("--in-flight", "limits", flights, stages)),
    )
