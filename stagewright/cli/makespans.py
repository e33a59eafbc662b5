"""``schedule`` and ``jobshop``: scheduling problems in plain numbers, without a model."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

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
from stagewright.cli.interrupts import interruptible
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from rich.text import Text

    from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable


T = TypeVar("T")
Backend = Annotated[
    str | None,
    typer.Option("--backend", help="Solver; cp-sat if left out.", metavar="NAME"),
]


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
    backend: Backend = None,
    as_json: JsonFlag = False,
) -> int:
    """Schedule the microbatches of a pipeline whose stages are given by their times."""
    limits = replace(read_limits(time_limit, threads, seed), backend=backend)
    problem = _read_makespan(stages, microbatches, times, transfer, in_flight)
    # After the input is read: bad input is refused without waiting for the solvers to load.
    from stagewright.solvers.pipelines.scheduling import solve_schedule

    with interruptible() as stop, progress("scheduling", stop) as on_progress:
        limits = replace(limits, stop=stop)
        result = solve_schedule(problem, kind.value, limits, on_progress)
    document = {
        "status": result.status,
        "planner": kind.value,
        "stages": stages,
        "microbatches": microbatches,
        "makespan": _plain(result.cost),
        "bound": _plain(result.bound),
        # The names that every answer of this command line has; the unit is that of --times.
        "cost_seconds": _plain(result.cost),
        "bound_seconds": _plain(result.bound),
        "gap": result.gap,
        "proved_by": result.proved_by,
        "wall_seconds": result.seconds,
        "reason": None,
        "bubble": None,
        "order": None,
        "starts": None,
    }
    if result.timetable is None:
        document["reason"] = (
            f"{kind.value} keeps all {microbatches} microbatches in flight, "
            f"the smallest limit is {min(problem.in_flight)}"
        )
    else:
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
    backend: Backend = None,
    as_json: JsonFlag = False,
) -> int:
    """Solve a job shop: jobs visit machines in given orders, the last is to end soonest."""
    from stagewright.formulations.pipelines.jobshop import parse_jobshop
    from stagewright.graphs.documents.documents import read_text
    from stagewright.solvers.pipelines.jobshop import solve_jobshop

    limits = replace(read_limits(time_limit, threads, seed), backend=backend)
    problem = parse_jobshop(read_text(file), str(file))
    with interruptible() as stop, progress(f"scheduling {file.name}", stop) as on_progress:
        result = solve_jobshop(problem, replace(limits, stop=stop), on_progress)
    machines = len({machine for steps in problem.jobs for machine, _ in steps})
    document = {
        "status": result.status,
        "makespan": result.cost,
        "bound": result.bound,
        "cost_seconds": result.cost,
        "bound_seconds": result.bound,
        "gap": result.gap,
        "proved_by": result.proved_by,
        "wall_seconds": result.seconds,
        "jobs": len(problem.jobs),
        "machines": machines,
        "starts": result.starts,
    }
    if as_json:
        print_json(document)
    else:
        found = "no answer" if result.cost is None else f"makespan {result.cost}"
        print_lines(
            f"{file.name}: {len(problem.jobs)} jobs on {machines} machines",
            f"{found} ({result.status}), bound {result.bound} by {result.proved_by}, "
            f"gap {percent(result.gap)}, {result.seconds:.2f} s",
        )
        rows = [(str(j), " ".join(map(str, row))) for j, row in enumerate(result.starts or ())]
        if rows:
            print_table(("job", "<starts of its steps"), rows)
    return 1 if result.starts is None else 0


def _read_makespan(
    stages: int, microbatches: int, times: list[str], transfer: str, in_flight: str | None
) -> "MakespanProblem":
    from stagewright.formulations.pipelines.makespan import MakespanProblem
    from stagewright.graphs.documents.units import MAX_LAYERS, MAX_MICROBATCHES, require_count

    require_count(stages, "--stages", MAX_LAYERS)
    require_count(microbatches, "--microbatches", MAX_MICROBATCHES)
    pairs = [_numbers("--times", pair) for text in times for pair in text.replace(";", " ").split()]
    for pair in pairs:
        if len(pair) != 2:
            raise InputError(f"--times: {len(pair)} numbers are no pair; write F,B")
    pairs = _per_place("--times", pairs, stages, "stage")
    sends = tuple(_per_place("--transfer", _numbers("--transfer", transfer), stages - 1, "channel"))
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
        tuple(int(limit) for limit in _per_place("--in-flight", flights, stages, "stage")),
    )


def _numbers(option: str, text: str) -> list[float]:
    """Numbers with commas or spaces between them."""
    try:
        return [float(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(f"{option}: {text!r} is no list of numbers") from None


def _per_place(option: str, values: list[T], size: int, places: str) -> list[T]:
    """``values``, one per place; a single one is for all places."""
    if len(values) == 1:
        return values * size
    if len(values) != size:
        raise InputError(f"{option} needs one value or {size}, one per {places}; got {len(values)}")
    return values


def _plain(value: float | None) -> float | int | None:
    """A whole number as an int, so that integers stay integers."""
    return int(value) if value is not None and float(value).is_integer() else value


def _timetable_json(problem: "MakespanProblem", timetable: "Timetable") -> dict[str, Any]:
    """The bubble, and each stage's actions in order with their starts.

    The bubble is the idle time of the busiest stage as a fraction of its work, which with equal
    stages and no transfers is (S - 1) / M for GPipe and 1F1B (Narayanan's thesis, 4.2.2).
    """
    load = problem.microbatches * max(
        forward + backward
        for forward, backward in zip(problem.forward, problem.backward, strict=True)
    )
    rows = _rows(timetable)
    return {
        "bubble": (timetable.makespan(problem) - load) / load if load else 0.0,
        "order": [[action for _, action in row] for row in rows],
        "starts": [[_plain(start) for start, _ in row] for row in rows],
    }


def _rows(timetable: "Timetable") -> list[list[tuple[float, str]]]:
    """Per stage (start, action), by start; at one instant in the order of the rounds."""
    rows = []
    for s, (forward, backward) in enumerate(
        zip(timetable.forward.tolist(), timetable.backward.tolist(), strict=True)
    ):
        row = [(start, f"{s}F{m}", 0, m) for m, start in enumerate(forward)]
        row += [(start, f"{s}B{m}", 1, m) for m, start in enumerate(backward)]
        row.sort(key=lambda entry: (entry[0], entry[2], entry[3]))
        rows.append([(start, action) for start, action, _, _ in row])
    return rows


def _print_schedule(
    problem: "MakespanProblem", timetable: "Timetable | None", document: dict[str, Any]
) -> None:
    if timetable is None:
        print_lines(f"{document['planner']}: {document['status']}: {document['reason']}")
        return
    print_table(
        ("<kind", "<status", "makespan", "bound", "gap", "<proved by", "bubble", "seconds"),
        [
            (
                document["planner"], document["status"], f"{document['makespan']:g}",
                f"{document['bound']:g}", percent(document["gap"]), document["proved_by"],
                percent(document["bubble"]), f"{document['wall_seconds']:.2f}",
            )
        ],
    )  # fmt: skip
    print_lines(*_drawing(problem, timetable, out().width))


def _drawing(problem: "MakespanProblem", timetable: "Timetable", width: int) -> "list[Text]":
    """The stages' rows to scale, if the shortest block is at least one column wide."""
    from rich.text import Text

    durations = [*problem.forward, *problem.backward]
    shortest = min((duration for duration in durations if duration > 0), default=0.0)
    if shortest == 0:
        return []
    left = len(f"stage {problem.stages - 1}  ")
    makespan = timetable.makespan(problem)
    scale = (width - left) // makespan if makespan <= width - left else (width - left) / makespan
    if shortest * scale < 1:
        return [Text(f"a drawing to scale needs more than {width} columns")]
    lines = []
    for s in range(problem.stages):
        line = Text(f"stage {s}".ljust(left))
        blocks = [
            (start, problem.forward[s], f"F{m}", "white on blue")
            for m, start in enumerate(timetable.forward[s].tolist())
        ] + [
            (start, problem.backward[s], f"B{m}", "black on green")
            for m, start in enumerate(timetable.backward[s].tolist())
        ]
        for start, duration, label, style in sorted(blocks):
            begin, end = (left + round(time * scale) for time in (start, start + duration))
            line.append("·" * (begin - len(line)))
            line.append(_label(label, end - begin), style)
        lines.append(line)
    return lines


def _label(label: str, columns: int) -> str:
    """``label`` in so many columns; only the microbatch's last digits where it is too long."""
    text = label if len(label) < columns else label[-max(columns - 1, 1) :]
    return (text.ljust(columns - 1) + "|")[:columns]
