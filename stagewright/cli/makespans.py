"""``schedule`` and ``jobshop``: scheduling problems given by times, without a model."""

import re
from collections.abc import Callable
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
    ask,
    out,
    percent,
    print_answer,
    print_lines,
    print_table,
    progress,
    read_limits,
)
from stagewright.cli.interrupts import interruptible
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from rich.text import Text

    from stagewright.formulations.forms.answers import OnProgress, StopToken
    from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
    from stagewright.service.pipeline_answers import JobShopAnswer, ScheduleAnswer


A = TypeVar("A")
T = TypeVar("T")
Backend = Annotated[
    str | None,
    typer.Option("--backend", help="Solver; default: cp-sat.", metavar="NAME"),
]


SPELLED = {
    "forward": "--times: forward",
    "backward": "--times: backward",
    "weight_gradient": "--times: weight gradient",
    "send_forward": "--transfer",
    "send_backward": "--transfer",
    "device": "--devices",
}
"""Options whose name differs from the field of a schedule's request or problem."""


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
            help="Forward and backward time; or F,I,W: forward, input gradient, weight gradient. "
            "Once for all stages, or per stage as '1,2;2,3' or repeated.",
            metavar="F,B",
        ),
    ],
    transfer: Annotated[
        str, typer.Option(help="Transfer time: one, or one per channel.", metavar="C,...")
    ] = "0",
    in_flight: Annotated[
        str | None,
        typer.Option(
            help="Maximum number of microbatches in flight: one, or one per stage.", metavar="N,..."
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="The device of each stage, from 0 in the order of their use, such as 0,1,0,1; "
            "one per stage if left out. Nothing is transferred between stages on one device; "
            "every other pair of neighbouring stages has its own channel.",
            metavar="D,...",
        ),
    ] = None,
    kind: Annotated[Kind, typer.Option(help="A rule, or the optimal schedule.")] = Kind.OPTIMAL,
    time_limit: TimeLimit = 10.0,
    threads: Threads = DEFAULT_THREADS,
    seed: Seed = 0,
    backend: Backend = None,
    as_json: JsonFlag = False,
) -> int:
    """Schedule the microbatches of a pipeline of stages with given times."""
    from stagewright.service.pipeline_requests import ScheduleRequest
    from stagewright.service.scheduling import schedule as answer_of

    request = ask(
        ScheduleRequest,
        SPELLED,
        **_read_limits(time_limit, threads, seed),
        **_read_times(stages, microbatches, times, transfer, in_flight),
        device=_read_devices(devices, stages),
        kind=kind.value,
        backend=backend,
    )
    answer = _find(answer_of, request, "scheduling")
    if as_json:
        print_answer(answer)
    else:
        _print_schedule(answer)
    return 1 if answer.makespan is None else 0


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
        **_read_limits(time_limit, threads, seed),
        jobs=parse_jobshop(read_text(file), str(file)).jobs,
        backend=backend,
    )
    answer = _find(answer_of, request, f"scheduling {file.name}")
    if as_json:
        print_answer(answer)
    else:
        _print_jobshop(file.name, answer)
    return 1 if answer.starts is None else 0


def _read_limits(seconds: float, threads: int, seed: int) -> dict[str, Any]:
    """The fields of a request."""
    limits = read_limits(seconds, threads, seed)
    return {"time_limit": limits.seconds, "threads": limits.threads, "seed": limits.seed}


def _find(answer_of: Callable[[T, "OnProgress", "StopToken"], A], request: T, task: str) -> A:
    """The answer, with progress shown as that of ``task``; Ctrl-C ends the search."""
    with interruptible() as stop, progress(task, stop) as on_progress:
        return answer_of(request, on_progress, stop)


def _read_times(
    stages: int, microbatches: int, times: list[str], transfer: str, in_flight: str | None
) -> dict[str, Any]:
    """The fields of a request."""
    from stagewright.graphs.documents.units import MAX_LAYERS, MAX_MICROBATCHES, require_count

    require_count(stages, "--stages", MAX_LAYERS)
    require_count(microbatches, "--microbatches", MAX_MICROBATCHES)
    rows = [_numbers("--times", row) for text in times for row in text.replace(";", " ").split()]
    for row in rows:
        if len(row) not in (2, 3) or len(row) != len(rows[0]):
            raise InputError(
                f"--times: {len(row)} numbers; write F,B for every stage or F,I,W for every stage"
            )
    columns = list(zip(*_per_place("--times", rows, stages, "stage"), strict=True))
    sends = tuple(_per_place("--transfer", _numbers("--transfer", transfer), stages - 1, "channel"))
    flights = [float(microbatches)] if in_flight is None else _numbers("--in-flight", in_flight)
    for limit in flights:
        if not (limit.is_integer() and limit >= 1):
            raise InputError(f"--in-flight must be whole numbers from 1, got {limit:g}")
    return {
        "microbatches": microbatches,
        "forward": columns[0],
        "backward": columns[1],
        "weight_gradient": columns[2] if len(columns) == 3 else (),
        "transfers": sends,
        "in_flight": tuple(int(n) for n in _per_place("--in-flight", flights, stages, "stage")),
    }


def _read_devices(text: str | None, stages: int) -> tuple[int, ...]:
    if text is None:
        return ()
    devices = _numbers("--devices", text)
    for device in devices:
        if not (device.is_integer() and device >= 0):
            raise InputError(f"--devices must be whole numbers from 0, got {device:g}")
    if len(devices) != stages:
        raise InputError(f"--devices needs {stages} values, one per stage; got {len(devices)}")
    return tuple(map(int, devices))


def _numbers(option: str, text: str) -> list[float]:
    """Numbers separated by commas or spaces."""
    try:
        return [float(part) for part in re.split(r"\s*,\s*|\s+", text.strip())]
    except ValueError:
        raise InputError(f"{option}: {text!r} is no list of numbers") from None


def _per_place(option: str, values: list[T], size: int, places: str) -> list[T]:
    """``values``, one per place; a single one is used for all places."""
    if len(values) == 1:
        return values * size
    if len(values) != size:
        raise InputError(f"{option} needs one value or {size}, one per {places}; got {len(values)}")
    return values


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


def _print_schedule(answer: "ScheduleAnswer") -> None:
    timetable = answer.result.timetable
    if timetable is None:
        print_lines(f"{answer.planner}: {answer.status}: {answer.reason}")
        return
    print_table(
        ("<kind", "<status", "makespan", "bound", "gap", "<proved by", "bubble", "seconds"),
        [
            (
                answer.planner, answer.status, f"{answer.makespan:g}", f"{answer.bound:g}",
                percent(answer.gap), answer.proved_by, percent(answer.bubble),
                f"{answer.wall_seconds:.2f}",
            )
        ],
    )  # fmt: skip
    print_lines(*_drawing(answer.problem, timetable, out().width))


def _drawing(problem: "MakespanProblem", timetable: "Timetable", width: int) -> "list[Text]":
    """The devices' rows to scale, if the shortest block is at least one column wide."""
    from rich.text import Text

    durations = [*problem.forward, *problem.backward, *(problem.weight_gradient or ())]
    shortest = min((duration for duration in durations if duration > 0), default=0.0)
    if shortest == 0:
        return []
    place = "stage" if problem.is_disjoint else "device"
    left = len(f"{place} {max(problem.device)}  ")
    makespan = timetable.makespan(problem)
    scale = (width - left) // makespan if makespan <= width - left else (width - left) / makespan
    if shortest * scale < 1:
        return [Text(f"a drawing to scale needs more than {width} columns")]
    lines = []
    for d, row in enumerate(_drawn_blocks(problem, timetable)):
        line = Text(f"{place} {d}".ljust(left))
        for start, duration, label, style in sorted(row):
            begin, end = (left + round(time * scale) for time in (start, start + duration))
            line.append("·" * (begin - len(line)))
            line.append(_label(label, end - begin), style)
        lines.append(line)
    return lines


_Block = tuple[float, float, str, str]  # start, duration, label, style


def _drawn_blocks(problem: "MakespanProblem", timetable: "Timetable") -> list[list[_Block]]:
    """The blocks of each device; the stage is named where a device has several."""
    from stagewright.formulations.pipelines.timed_rows import timed_rows

    weight = problem.weight_gradient or ()
    known = {
        "F": (problem.forward, "white on blue"),
        "B": (problem.backward, "black on green"),
        "I": (problem.backward, "black on green"),
        "W": (weight, "black on yellow"),
    }
    rows = []
    for row in timed_rows(problem, timetable):
        blocks = []
        for start, action in row:
            durations, style = known[action.kind]
            name = str(action) if not problem.is_disjoint else f"{action.kind}{action.microbatch}"
            blocks.append((start, durations[action.stage], name, style))
        rows.append(blocks)
    return rows


def _label(label: str, columns: int) -> str:
    """``label`` in a fixed number of columns; shortened to the microbatch's last digits."""
    text = label if len(label) < columns else label[-max(columns - 1, 1) :]
    return (text.ljust(columns - 1) + "|")[:columns]
