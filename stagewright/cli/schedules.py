"""``schedule``: one schedule of stages with given times, all published ones, or a curve."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stagewright.cli.commands import Asked, command
from stagewright.cli.common import Printed, Served, Threaded, tell, threads_of
from stagewright.cli.console import ask, progress, spelled, with_option
from stagewright.cli.outputs import Writes
from stagewright.cli.schedule_options import read_stages
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
from stagewright.graphs.documents.documents import write_bytes, write_text
from stagewright.graphs.documents.errors import InputError
from stagewright.service.options import Option
from stagewright.service.pipeline_requests import (
    CompareSchedulesRequest,
    MemoryCurveRequest,
    ScheduleRequest,
)

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


class ScheduleOptions(Served, Threaded, Printed):
    """What ``schedule`` is asked beside its request."""

    stages: Annotated[int, Option(form="P")]
    """Number of pipeline stages P. Every stage has its own device, unless --stage-devices says
    otherwise: there are P devices."""
    times: Annotated[list[str], Option(form="F,B")]
    """Forward and backward time; or F,I,W: forward, input gradient, weight gradient. Once for all
    stages, or per stage as '1,2;2,3' or repeated. Kinds that do not split backwards take I + W for
    a whole one."""
    compare: bool = False
    """All kinds that fit, and the optimum, in one table."""
    curve: bool = False
    """The optimum for every limit in --memory-limit, each with its bound; without --memory-limit
    from the least possible to where more is of no use. --html and --png draw it."""
    html: Annotated[Path | None, Option(form="FILE"), Writes(".html")] = None
    """Draw the devices' rows on a page."""
    png: Annotated[Path | None, Option(form="FILE"), Writes(".png")] = None
    """Draw the devices' rows."""
    csv: Annotated[Path | None, Option(form="FILE"), Writes(".csv")] = None
    """Write the schedule file of torch.distributed.pipelining."""
    stage_devices: Annotated[str | None, Option(form="D,...")] = None
    """The device of each of the P stages, from 0 in the order of their use, such as 0,1,0,1, in
    place of --chunks. Nothing is transferred between stages on one device; every other pair of
    neighbouring stages has its own channel."""
    transfer: Annotated[str, Option(form="C,...")] = "0"
    """Transfer time: one, or one per channel."""
    in_flight: Annotated[str | None, Option(form="N,...")] = None
    """Maximum number of microbatches in flight: one, or one per stage."""
    saved: Annotated[list[str] | None, Option(form="f,i,w")] = None
    """What a forward adds to the memory of its device, and the input gradient and the weight
    gradient give back, in any unit; per stage as --times. f alone is given back at the end.
    Default: 1, so that memory is in microbatches."""
    memory_limit: Annotated[str | None, Option(form="N,...")] = None
    """Limit on that memory: one, or one per device. zb1p, zb2p, zbv and optimal keep it; other
    kinds fit or do not."""


@command(
    headings={
        "Where stages are": "chunks placement stage_devices replicas",
        "Transfers and memory": "transfer duplex in_flight saved memory_limit",
        "Search": "objective makespan_limit backend time_limit threads seed server",
    }
)
def schedule(asked: Asked[ScheduleRequest], given: ScheduleOptions) -> int:
    """Schedule the microbatches of a pipeline of stages with given times."""
    fields = asked.values() | {
        "threads": threads_of(given.threads, given.server),
        **read_stages(given, asked.given["microbatches"]),
    }
    if given.compare and given.curve:
        raise InputError("--compare and --curve are two answers; leave one of them out")
    names = ("kind", "replicas", "makespan_limit")
    single = {name: fields.pop(name) for name in names if name in fields}
    of_one = {spelled(name): value for name, value in single.items()} | {"--csv": given.csv}
    if given.curve:
        _require_none("--curve", of_one)
        return _curve(fields, given)
    if given.compare:
        _require_none("--compare", {**of_one, "--placement": fields.pop("placement")})
        return _compare(fields, given)
    return _schedule(fields | single, given)


def _require_none(option: str, others: Mapping[str, object]) -> None:
    """Refuse options that are of a single schedule."""
    for other, given in others.items():
        if given is not None:
            raise InputError(f"{other} is of one schedule; leave it or {option} out")


def _schedule(fields: dict[str, Any], given: ScheduleOptions) -> int:
    from stagewright.service.pipeline_answers import ScheduleAnswer

    request = ask(ScheduleRequest, SPELLED, **fields)
    if given.csv is not None:
        _require_torch(request.kind)
    answer = find(ScheduleAnswer, request, "scheduling", given.server)
    files = []
    if answer.timed is not None:
        if given.csv is not None:
            _write_csv(answer, given.csv)
            files.append(given.csv)
        files += _draw(answer.kind, [answer], [answer], given)
    tell(answer, given, print_schedule, files, listed=True)
    return 1 if answer.makespan is None else 0


def _compare(fields: dict[str, Any], given: ScheduleOptions) -> int:
    from stagewright.service.pipeline_answers import ScheduleComparison

    def show(answer: ScheduleComparison) -> None:
        print_comparison(answer, lambda reason: with_option(reason, fields, SPELLED))

    request = ask(CompareSchedulesRequest, SPELLED, **fields)
    answer = find(ScheduleComparison, request, "comparing schedules", given.server)
    files = _draw("all kinds", answer.schedules, answer.answers, given)
    tell(answer, given, show, files, listed=True)
    return 0 if answer.schedules else 1


def _curve(fields: dict[str, Any], given: ScheduleOptions) -> int:
    from stagewright.service.pipeline_answers import MemoryCurve

    request = ask(MemoryCurveRequest, SPELLED, **fields)
    answer = find(MemoryCurve, request, "scheduling for every limit of memory", given.server)
    if given.html is not None or given.png is not None:
        from stagewright.executor.drawing.memory_curve import curve_page, curve_png

        with progress("drawing"):
            drawn, subtitle = drawn_curve(answer), curve_title(answer)
            if given.html is not None:
                page = curve_page(drawn, subtitle, CURVE_HEAD, curve_cells(answer))
                write_text(given.html, page)
            if given.png is not None:
                write_bytes(given.png, curve_png(drawn))
    tell(answer, given, print_curve, (given.html, given.png), listed=True)
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

    assert answer.timed is not None
    write_text(file, order_csv(answer.timed.order))


def _draw(
    title: str,
    figures: "Sequence[ScheduleFigures]",
    answers: "Sequence[ScheduleAnswer]",
    given: ScheduleOptions,
) -> list[Path]:
    """Draw the schedules one above the other; the files that are written."""
    html, png = given.html, given.png
    if not answers or (html is None and png is None):
        return []
    from stagewright.executor.drawing.schedules import panel, schedules_page, schedules_png

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
