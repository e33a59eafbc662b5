"""``schedule``: one schedule of stages with given times, all published ones, or a curve."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from stagewright.cli.commands import Asked, ask, command, spelled, with_option
from stagewright.cli.console import progress, tell
from stagewright.cli.options import Printed, Served, Threaded, threads_of
from stagewright.cli.outputs import Writes
from stagewright.cli.schedules.printing import (
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
from stagewright.formulations.schedules.published.kinds import KINDS
from stagewright.graphs.documents.documents import write_file
from stagewright.graphs.documents.errors import InputError
from stagewright.service.options import Option
from stagewright.service.schedules.requests import (
    CompareSchedulesRequest,
    MemoryCurveRequest,
    ScheduleRequest,
)

if TYPE_CHECKING:
    from stagewright.service.schedules.requests import ScheduleAnswer, ScheduleFigures

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
        **_read_stages(given, asked.given["microbatches"]),
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
    """Refuse options that apply to a single schedule."""
    for other, given in others.items():
        if given is not None:
            raise InputError(f"{other} is of one schedule; leave it or {option} out")


def _schedule(fields: dict[str, Any], given: ScheduleOptions) -> int:
    from stagewright.service.schedules.requests import ScheduleAnswer

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
    from stagewright.service.schedules.requests import ScheduleComparison

    def show(answer: ScheduleComparison) -> None:
        print_comparison(answer, lambda reason: with_option(reason, fields, SPELLED))

    request = ask(CompareSchedulesRequest, SPELLED, **fields)
    answer = find(ScheduleComparison, request, "comparing schedules", given.server)
    files = _draw("all kinds", answer.schedules, answer.answers, given)
    tell(answer, given, show, files, listed=True)
    return 0 if answer.schedules else 1


def _curve(fields: dict[str, Any], given: ScheduleOptions) -> int:
    from stagewright.service.schedules.requests import MemoryCurve

    request = ask(MemoryCurveRequest, SPELLED, **fields)
    answer = find(MemoryCurve, request, "scheduling for every limit of memory", given.server)
    if given.html is not None or given.png is not None:
        from stagewright.executor.drawing.schedules import curve_page, curve_png

        with progress("drawing"):
            drawn, subtitle = drawn_curve(answer), curve_title(answer)
            if given.html is not None:
                page = curve_page(drawn, subtitle, CURVE_HEAD, curve_cells(answer))
                write_file(given.html, page)
            if given.png is not None:
                write_file(given.png, curve_png(drawn))
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
    write_file(file, order_csv(answer.timed.order))


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
            write_file(html, page)
        if png is not None:
            write_file(png, schedules_png(panels))
    return [path for path in (html, png) if path is not None]


def _drawn_bound(answer: "ScheduleAnswer") -> float | None:
    return answer.bound if answer.objective == "makespan" else None


T = TypeVar("T")


def _read_stages(given: "ScheduleOptions", microbatches: int) -> dict[str, Any]:
    """The fields of a request that the options about stages give."""
    stages, in_flight = given.stages, given.in_flight
    from stagewright.graphs.documents.units import MAX_LAYERS, MAX_MICROBATCHES, require_count

    require_count(stages, "--stages", MAX_LAYERS)
    require_count(microbatches, "--microbatches", MAX_MICROBATCHES)
    return {
        "transfers": tuple(_numbers("--transfer", given.transfer)),
        "device": _read_devices(given.stage_devices, stages),
        "memory": _read_memory(given.memory_limit),
        **_read_times(given.times, stages),
        **_read_saved(given.saved or [], stages),
        **({} if in_flight is None else {"in_flight": _read_in_flight(in_flight, stages)}),
    }


def _read_memory(text: str | None) -> tuple[float, ...]:
    return () if text is None else tuple(_numbers("--memory-limit", text))


def _read_times(times: list[str], stages: int) -> dict[str, Any]:
    columns = _columns("--times", times, stages, {2: "F,B", 3: "F,I,W"})
    return {
        "forward": columns[0],
        "backward": columns[1],
        "weight_gradient": columns[2] if len(columns) == 3 else (),
    }


def _read_saved(saved: list[str], stages: int) -> dict[str, Any]:
    """The memory that forwards save and input gradients free, from ``--saved``."""
    if not saved:
        return {}
    columns = _columns("--saved", saved, stages, {1: "f", 3: "f,i,w"})
    if len(columns) == 1:
        return {"saved": columns[0]}
    for s, (f, i, w) in enumerate(zip(*columns, strict=True)):
        if not math.isclose(f, i + w):
            raise InputError(
                f"--saved: stage {s}: I and W must give back what F adds, {f:g}, not {i:g} + {w:g}"
            )
    return {"saved": columns[0], "freed": columns[1]}


def _read_in_flight(text: str, stages: int) -> tuple[int, ...]:
    limits = _numbers("--in-flight", text)
    for limit in limits:
        if not (limit.is_integer() and limit >= 1):
            raise InputError(f"--in-flight must be whole numbers from 1, got {limit:g}")
    return tuple(int(n) for n in _per_place("--in-flight", limits, stages, "stage"))


def _read_devices(text: str | None, stages: int) -> tuple[int, ...]:
    if text is None:
        return ()
    devices = _numbers("--stage-devices", text)
    for device in devices:
        if not (device.is_integer() and device >= 0):
            raise InputError(f"--stage-devices must be whole numbers from 0, got {device:g}")
    if len(devices) != stages:
        raise InputError(
            f"--stage-devices needs {stages} values, one per stage; got {len(devices)}"
        )
    return tuple(map(int, devices))


def _columns(
    option: str, texts: list[str], stages: int, forms: dict[int, str]
) -> list[tuple[float, ...]]:
    """The numbers of all stages by column, from groups such as ``F,B`` for one stage or all."""
    rows = [_numbers(option, row) for text in texts for row in text.replace(";", " ").split()]
    for row in rows:
        if len(row) not in forms or len(row) != len(rows[0]):
            which = " or ".join(f"{form} for every stage" for form in forms.values())
            raise InputError(f"{option}: {len(row)} numbers; write {which}")
    return list(zip(*_per_place(option, rows, stages, "stage"), strict=True))


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
