"""``schedule``: one schedule of stages with given times, all published ones, or a curve."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.console import (
    JsonFlag,
    Seed,
    Server,
    Threads,
    TimeLimit,
    ask,
    print_json,
    print_lines,
    progress,
    with_option,
)
from stagewright.cli.makespans import Backend, limit_fields
from stagewright.cli.outputs import Writes
from stagewright.cli.schedule_options import read_replicas, read_stages
from stagewright.cli.schedule_printing import (
    CURVE_HEAD,
    FIGURES,
    cells,
    curve_cells,
    curve_title,
    drawn_curve,
    print_comparison,
    print_curve,
    print_schedule,
    title_of,
)
from stagewright.cli.solving import find
from stagewright.formulations.schedules.kinds import KINDS
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.service.pipeline_answers import ScheduleAnswer, ScheduleFigures

SPELLED = {
    "forward": "--times: forward",
    "backward": "--times: backward",
    "weight_gradient": "--times: weight gradient",
    "send_forward": "--transfer",
    "send_backward": "--transfer",
    "transfers": "--transfer",
    "device": "--stage-devices",
    "placement": "--placement",
    "freed": "--saved: i",
    "limit": "--memory-limit",
    "memory": "--memory-limit",
    # One value of a list.
    "forward[]": "--times: forward of stage",
    "backward[]": "--times: backward of stage",
    "weight_gradient[]": "--times: weight gradient of stage",
    "transfers[]": "--transfer of channel",
}
"""Options whose name differs from the field of a schedule's request or problem."""


class Placement(StrEnum):
    """Where chunks are, for kinds without a placement of their own."""

    LINE = "line"
    LOOP = "loop"
    V = "V"
    WAVE = "wave"


class Placing(StrEnum):
    """A placement, the best of them, or one of our own."""

    LINE = "line"
    LOOP = "loop"
    V = "V"
    WAVE = "wave"
    ANY = "any"
    FREE = "free"


class Duplex(StrEnum):
    """Whether the two directions of a channel share it (half) or not (full)."""

    HALF = "half"
    FULL = "full"


class Objective(StrEnum):
    """What bound, gap and status are of."""

    MAKESPAN = "makespan"
    SPAN = "span"
    MEMORY = "memory"


def known_kind(name: str | None) -> str | None:
    """Refuse a kind that does not exist."""
    from stagewright.service.schedule_setting import SCHEDULES

    if name is not None and name not in SCHEDULES:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(SCHEDULES)}")
    return name


def schedule(
    stages: Annotated[
        int,
        typer.Option(
            help="Number of pipeline stages P. Every stage has its own device, unless "
            "--stage-devices says otherwise: there are P devices.",
            metavar="P",
        ),
    ],
    microbatches: Annotated[int, typer.Option(help="Number of microbatches.", metavar="M")],
    times: Annotated[
        list[str],
        typer.Option(
            help="Forward and backward time; or F,I,W: forward, input gradient, weight gradient. "
            "Once for all stages, or per stage as '1,2;2,3' or repeated. Kinds that do not split "
            "backwards take I + W for a whole one.",
            metavar="F,B",
        ),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            help="gpipe, 1f1b or pe (on any devices); a published schedule: "
            f"{', '.join(name for name in KINDS if name not in ('gpipe', '1f1b'))}; or optimal, "
            "the default. chimera and dualpipe have two copies of every stage.",
            metavar="NAME",
            callback=known_kind,
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="All kinds that fit, and the optimum, in one table.")
    ] = False,
    curve: Annotated[
        bool,
        typer.Option(
            "--curve",
            help="The optimum for every limit in --memory-limit, each with its bound; without "
            "--memory-limit from the least possible to where more is of no use. --html and --png "
            "draw it.",
        ),
    ] = False,
    chunks: Annotated[
        int | None,
        typer.Option(
            help="Divide every stage into V equal chunks, each with 1/V of its times and memory: a "
            "device has V of the P x V chunks, in a loop, a V or a wave. Actions name the chunk. "
            "Default: 2 where the kind has chunks.",
            metavar="V",
        ),
    ] = None,
    placement: Annotated[
        Placing | None,
        typer.Option(
            help="Where the chunks of the kinds pe and optimal are; others have theirs. For "
            "optimal also the best of these (any), or on any device (free): then a stage's chunks "
            "follow each other in the model; not with --objective memory.",
            case_sensitive=False,
        ),
    ] = None,
    stage_devices: Annotated[
        str | None,
        typer.Option(
            help="The device of each of the P stages, from 0 in the order of their use, such as "
            "0,1,0,1, in place of --chunks. Nothing is transferred between stages on one device; "
            "every other pair of neighbouring stages has its own channel.",
            metavar="D,...",
        ),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            help="With --kind 1f1b-rr: devices of each of the P stages, such as 2,1,1; they take "
            "microbatches in turn.",
            metavar="R,...",
        ),
    ] = None,
    transfer: Annotated[
        str, typer.Option(help="Transfer time: one, or one per channel.", metavar="C,...")
    ] = "0",
    in_flight: Annotated[
        str | None,
        typer.Option(
            help="Maximum number of microbatches in flight: one, or one per stage.", metavar="N,..."
        ),
    ] = None,
    saved: Annotated[
        list[str] | None,
        typer.Option(
            help="What a forward adds to the memory of its device, and the input gradient and the "
            "weight gradient give back, in any unit; per stage as --times. f alone is given back "
            "at the end. Default: 1, so that memory is in microbatches.",
            metavar="f,i,w",
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Limit on that memory: one, or one per device. zb1p, zb2p, zbv and optimal keep "
            "it; other kinds fit or do not.",
            metavar="N,...",
        ),
    ] = None,
    objective: Annotated[
        Objective,
        typer.Option(
            help="What bound, gap and status are of, and what --compare sorts by: the end; the "
            "longest time of a device from its first to its last computation; peak memory. Kind "
            "optimal minimises it."
        ),
    ] = Objective.MAKESPAN,
    makespan_limit: Annotated[
        float | None,
        typer.Option(
            help="With --kind optimal --objective memory: the least memory of schedules that take "
            "at most this.",
            metavar="TIME",
        ),
    ] = None,
    duplex: Annotated[
        Duplex, typer.Option(help="Whether the two directions of a channel share it.")
    ] = Duplex.HALF,
    html: Annotated[
        Path | None,
        typer.Option(help="Draw the devices' rows on a page.", metavar="FILE"),
        Writes(".html"),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw the devices' rows.", metavar="FILE"), Writes(".png")
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            help="Write the schedule file of torch.distributed.pipelining.", metavar="FILE"
        ),
        Writes(".csv"),
    ] = None,
    time_limit: TimeLimit = 10.0,
    threads: Threads = None,
    seed: Seed = 0,
    backend: Backend = None,
    server: Server = None,
    as_json: JsonFlag = False,
) -> int:
    """Schedule the microbatches of a pipeline of stages with given times."""
    fields = {
        **limit_fields(time_limit, threads, seed, server),
        **read_stages(
            stages,
            microbatches,
            times,
            transfer,
            in_flight,
            stage_devices,
            saved or [],
            memory_limit,
        ),
        "chunks": chunks,
        "objective": objective.value,
        "duplex": duplex.value,
        "backend": backend,
    }
    if compare and curve:
        raise InputError("--compare and --curve are two answers; leave one of them out")
    of_one = {
        "--kind": kind, "--replicas": replicas, "--makespan-limit": makespan_limit, "--csv": csv,
    }  # fmt: skip
    if compare:
        _require_none("--compare", {**of_one, "--placement": placement})
        return _compare(fields, server, html, png, as_json)
    if curve:
        _require_none("--curve", of_one)
        fields["placement"] = None if placement is None else placement.value
        return _curve(fields, server, html, png, as_json)
    fields["kind"] = kind or "optimal"
    fields["replicas"] = read_replicas(replicas)
    if placement is not None:
        fields["placement"] = placement.value
    if makespan_limit is not None:
        fields["makespan_limit"] = makespan_limit
    return _schedule(fields, server, html, png, csv, as_json)


def _require_none(option: str, others: Mapping[str, object]) -> None:
    """Refuse options that are of a single schedule."""
    for other, given in others.items():
        if given is not None:
            raise InputError(f"{other} is of one schedule; leave it or {option} out")


def _schedule(
    fields: dict[str, object],
    server: str | None,
    html: Path | None,
    png: Path | None,
    csv: Path | None,
    as_json: bool,
) -> int:
    from stagewright.service.pipeline_answers import ScheduleAnswer
    from stagewright.service.pipeline_requests import ScheduleRequest

    request = ask(ScheduleRequest, SPELLED, **fields)
    if csv is not None:
        _require_torch(request.kind)
    answer = find(ScheduleAnswer, request, "scheduling", server)
    files = []
    if answer.timed is not None:
        if csv is not None:
            _write_csv(answer, csv)
            files.append(csv)
        files += _draw(answer.kind, [answer], [answer], html, png)
    if as_json:
        print_json(answer.json_object() | {"files": list(map(str, files))})
    else:
        print_schedule(answer)
        print_lines(*(f"{path} is written" for path in files))
    return 1 if answer.makespan is None else 0


def _compare(
    fields: dict[str, object],
    server: str | None,
    html: Path | None,
    png: Path | None,
    as_json: bool,
) -> int:
    from stagewright.service.pipeline_answers import ScheduleComparison
    from stagewright.service.pipeline_requests import CompareSchedulesRequest

    request = ask(CompareSchedulesRequest, SPELLED, **fields)
    answer = find(ScheduleComparison, request, "comparing schedules", server)
    files = _draw("all kinds", answer.schedules, answer.answers, html, png)
    if as_json:
        print_json(answer.json_object() | {"files": list(map(str, files))})
    else:
        print_comparison(answer, lambda reason: with_option(reason, fields, SPELLED))
        print_lines(*(f"{path} is written" for path in files))
    return 0 if answer.schedules else 1


def _curve(
    fields: dict[str, object],
    server: str | None,
    html: Path | None,
    png: Path | None,
    as_json: bool,
) -> int:
    from stagewright.graphs.documents.documents import write_bytes, write_text
    from stagewright.service.pipeline_answers import MemoryCurve
    from stagewright.service.pipeline_requests import MemoryCurveRequest

    request = ask(MemoryCurveRequest, SPELLED, **fields)
    answer = find(MemoryCurve, request, "scheduling for every limit of memory", server)
    if html is not None or png is not None:
        from stagewright.executor.drawing.memory_curve import curve_page, curve_png

        with progress("drawing"):
            drawn, subtitle = drawn_curve(answer), curve_title(answer)
            if html is not None:
                write_text(html, curve_page(drawn, subtitle, CURVE_HEAD, curve_cells(answer)))
            if png is not None:
                write_bytes(png, curve_png(drawn))
    files = [path for path in (html, png) if path is not None]
    if as_json:
        print_json(answer.json_object() | {"files": list(map(str, files))})
    else:
        print_curve(answer)
        print_lines(*(f"{path} is written" for path in files))
    return 0


def _require_torch(kind: str) -> None:
    """Refuse kinds whose rule for weights or copies of stages torch does not have."""
    if kind not in KINDS:
        return
    if KINDS[kind].placement == "both directions":
        raise InputError(f"--csv: {kind} has two copies of every stage, torch's files have one")
    if KINDS[kind].weights != "flush":
        raise InputError(
            f"--csv: {kind} keeps several versions of the weights, torch one; 1f1b has its order"
        )


def _write_csv(answer: "ScheduleAnswer", file: Path) -> None:
    from stagewright.executor.export.torch_pipelining import order_csv
    from stagewright.graphs.documents.documents import write_text

    assert answer.timed is not None
    write_text(file, order_csv(answer.timed.order))


def _draw(
    title: str,
    figures: "Sequence[ScheduleFigures]",
    answers: "Sequence[ScheduleAnswer]",
    html: Path | None,
    png: Path | None,
) -> list[Path]:
    """Draw the schedules one above the other; the files that are written."""
    if not answers or (html is None and png is None):
        return []
    from stagewright.executor.drawing.schedules import panel, schedules_page, schedules_png
    from stagewright.graphs.documents.documents import write_bytes, write_text

    with progress("drawing"):
        panels = [
            panel(title_of(one), answer.timed, _drawn_bound(answer))
            for one, answer in zip(figures, answers, strict=True)
            if answer.timed is not None
        ]
        if html is not None:
            first = answers[0]
            subtitle = f"{first.stages} stages · {first.microbatches} microbatches"
            page = schedules_page(title, subtitle, FIGURES, [*map(cells, figures)], panels)
            write_text(html, page)
        if png is not None:
            write_bytes(png, schedules_png(panels))
    return [path for path in (html, png) if path is not None]


def _drawn_bound(answer: "ScheduleAnswer") -> float | None:
    return answer.bound if answer.objective == "makespan" else None
