"""Drawings of a placement of operators: rows for each device and for its transfers."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from stagewright.executor.drawing.charts.chart import MAX_OUTLINED_BLOCKS, WIDTH_INCHES
from stagewright.executor.drawing.charts.figures import bare_rows, save, stacked_axes
from stagewright.executor.drawing.chrome import trace_text
from stagewright.executor.drawing.colours import (
    CRITICAL_COLOUR,
    DARK_COLOURS,
    KIND_COLOURS,
    label_colour,
)
from stagewright.executor.drawing.lanes import Bar, BarKind, Drawing, Lane, Mark
from stagewright.executor.drawing.timeline import time_unit
from stagewright.executor.drawing.web.render import render
from stagewright.formulations.operators.plan import OperatorPlan, loads_of
from stagewright.formulations.plans.actions import ActionKind
from stagewright.graphs.documents.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = "operators.html.jinja"
TRANSFER, CRITICAL = "transfer", "critical path"
_COLOURS = {  # as in pipelines: forward, backward, optimizer step, activations sent
    "input": "#9aa7b5",
    "state": "#9aa7b5",
    "forward": KIND_COLOURS[ActionKind.FORWARD],
    "backward": KIND_COLOURS[ActionKind.BACKWARD],
    "update": KIND_COLOURS[ActionKind.UPDATE],
    TRANSFER: KIND_COLOURS[ActionKind.SEND_FORWARD],
    CRITICAL: CRITICAL_COLOUR,
}
_DARK = {
    "input": "#9aa7b5",
    "state": "#9aa7b5",
    "forward": DARK_COLOURS[ActionKind.FORWARD],
    "backward": DARK_COLOURS[ActionKind.BACKWARD],
    "update": DARK_COLOURS[ActionKind.UPDATE],
    TRANSFER: DARK_COLOURS[ActionKind.SEND_FORWARD],
}
_HEIGHT = {"device": 0.82, "sends": 0.46}  # of the space between two rows
CHARACTER_SHARE = 0.0052  # fraction of the axis' width that one character of a name needs
_LEAST_CHARACTERS = 4  # that are written on a bar of a name that is too long for it
STRIP = 0.12  # height of the mark of the critical path, at the foot of a row
_MOST_ROWS = 96  # with more, what devices send is left out


def lanes(plan: OperatorPlan, most: int | None = _MOST_ROWS) -> tuple[Lane, ...]:
    """Per device its operators, then its transfers to others; bars without length are left out.

    With more than ``most`` rows (None: never) transfers have none.
    """
    computed: dict[str, list[Bar]] = defaultdict(list)
    sent: dict[str, list[Bar]] = defaultdict(list)
    home = {one.operator: one.device for one in plan.operators}
    chain = set(plan.critical)
    crossed = {(one, home[other]) for one, other in pairwise(plan.critical)}
    for one in plan.operators:
        bar = Bar(one.operator, one.role, one.start_seconds, one.finish_seconds,
                  one.operator in chain, one.operator)  # fmt: skip
        computed[one.device].append(bar)
    for it in plan.transfers:
        critical = (it.operator, it.device) in crossed
        name = f"{it.operator} to {it.device}"
        bar = Bar(name, TRANSFER, it.start_seconds, it.finish_seconds, critical)
        sent[home[it.operator]].append(bar)
    rows = []
    for device in plan.peak_memory_bytes:
        rows.append(Lane(device, "device", _lasting(computed[device])))
        if sent[device]:
            rows.append(Lane(f"{device} sends", "sends", _lasting(sent[device])))
    if most is not None and len(rows) > most:
        rows = [row for row in rows if row.group == "device"]
    return tuple(rows)


def _lasting(bars: list[Bar]) -> tuple[Bar, ...]:
    return tuple(sorted((bar for bar in bars if bar.seconds > 0), key=lambda bar: bar.start))


def headline(plan: OperatorPlan) -> str:
    """Model, cluster, planner and the proved figures in one line."""
    parts = [f"{plan.model} on {plan.cluster}", plan.planner, f"{len(plan.operators)} operators"]
    if plan.certificate is not None:
        parts.append(f"{format_seconds(plan.certificate.cost_seconds)} per step")
        parts.append(f"gap {plan.certificate.gap:.2%} with these splits")
    return " · ".join(parts)


def end_of(plan: OperatorPlan) -> float:
    """The end of the last operator, in seconds."""
    return max(one.finish_seconds for one in plan.operators)


def png(plan: OperatorPlan) -> bytes:
    """The placement as a PNG; the critical path is marked at the foot of the rows."""
    return stacked_png((plan,), (headline(plan),))


def stacked_png(plans: Sequence[OperatorPlan], titles: Sequence[str]) -> bytes:
    """A PNG of placements one above the other on one time axis: predicted over measured."""
    drawn = [lanes(plan) for plan in plans]
    heights = [1.0 + 0.3 * len(rows) for rows in drawn]
    column = stacked_axes(WIDTH_INCHES, heights)
    last = max(end_of(plan) for plan in plans)
    unit, scale = time_unit(last)
    for axes, plan, rows, title in zip(column, plans, drawn, titles, strict=True):
        for y, row in enumerate(rows):
            _draw_lane(axes, y, row, scale)
            _name_bars(axes, y, row, scale, last)
        if plan.certificate is not None:
            bound = plan.certificate.bound_seconds * scale
            axes.axvline(bound, color=_COLOURS[CRITICAL], lw=1.2, ls="--")
        axes.set_xlim(0, last * scale * 1.005 or 1.0)
        axes.set_title(title, fontsize=11, loc="left", wrap=True)
        _dress(axes, rows, unit)
    _draw_legend(column[-1], plans, [row for rows in drawn for row in rows])
    return save(column[-1].figure)


def _dress(axes: "Axes", rows: Sequence[Lane], unit: str) -> None:
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.set_xlabel(f"time in {unit}")
    bare_rows(axes, len(rows))
    axes.label_outer()


def _draw_lane(axes: "Axes", y: int, row: Lane, scale: float) -> None:
    height, marked = _HEIGHT[row.group], [bar for bar in row.bars if bar.critical]
    outline = 0.4 if len(row.bars) <= MAX_OUTLINED_BLOCKS else 0
    for bars, foot, its, width, colours in (
        (row.bars, y - height / 2, height, outline, [_COLOURS[bar.kind] for bar in row.bars]),
        (marked, y + height / 2 - STRIP, STRIP, 0, _COLOURS[CRITICAL]),
    ):
        spans = [(bar.start * scale, bar.seconds * scale) for bar in bars]
        axes.broken_barh(
            spans, (foot, its), facecolors=colours, edgecolors="white", linewidth=width
        )


def _name_bars(axes: "Axes", y: int, row: Lane, scale: float, end: float) -> None:
    """Write the name of every operator on its bar, cut to the room on the bar."""
    for bar in (bar for bar in row.bars if bar.label):
        room = int(bar.seconds / (CHARACTER_SHARE * end)) if end else 0
        name = bar.label if len(bar.label) <= room else f"{bar.label[: room - 1]}…"
        if room >= min(_LEAST_CHARACTERS, len(bar.label)):
            axes.text((bar.start + bar.finish) / 2 * scale, y, name, ha="center", va="center",
                      fontsize=6, color=label_colour(_COLOURS[bar.kind]))  # fmt: skip


def _draw_legend(axes: "Axes", plans: Sequence[OperatorPlan], rows: Sequence[Lane]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [
        Patch(color=_COLOURS[kind], label=kind) for kind in (*_kinds(rows), CRITICAL)
    ]
    if any(plan.certificate is not None for plan in plans):
        line = Line2D([], [], color=_COLOURS[CRITICAL], ls="--", label="proved lower bound")
        handles.append(line)
    axes.figure.legend(
        handles=handles, loc="outside lower center", ncols=7, frameon=False, fontsize=8
    )


def _kinds(rows: Sequence[Lane]) -> list[str]:
    found = {bar.kind for row in rows for bar in row.bars}
    return [kind for kind in _COLOURS if kind in found]


def page(plan: OperatorPlan) -> str:
    """The page's HTML: timeline, bounds, devices and splits."""
    devices, end = loads_of(plan), end_of(plan) or 1.0
    return render(
        TEMPLATE,
        title=f"{plan.model} on {plan.cluster}",
        subtitle=f"planner {plan.planner} · {len(plan.operators)} operators on "
        f"{len(devices)} devices · {len(plan.transfers)} transfers",
        facts=list(_facts(plan)),
        timeline=drawing(plan),
        bounds=_bounds(plan),
        devices=[
            (
                one.device,
                str(one.operators),
                format_seconds(one.busy_seconds),
                f"{one.busy_seconds / end:.1%}",
                format_bytes(one.peak_memory_bytes),
            )
            for one in devices
        ],
        splits=[(one.operator, str(one.dimension), str(one.parts)) for one in plan.splits],
        unmeasured=len(plan.unmeasured),
    )


def _facts(plan: OperatorPlan) -> Iterator[tuple[str, str]]:
    yield format_seconds(end_of(plan)), "per step"
    if plan.certificate is not None:
        stated = plan.certificate
        yield format_seconds(stated.bound_seconds), f"bound, by {stated.proved_by}"
        yield f"{stated.gap:.2%}", "gap, over plans with these splits"
        yield f"{stated.any_splits_gap:.2%}", "gap, over plans with any splits"
    peak = max(plan.peak_memory_bytes.values(), default=0.0)
    yield format_bytes(peak), "peak memory of a device"


def _bounds(plan: OperatorPlan) -> list[dict[str, Any]]:
    """The cost and the bounds, from the largest; ``percent`` is relative to the cost."""
    if plan.certificate is None:
        return []
    cost = plan.certificate.cost_seconds
    ordered = sorted(plan.certificate.bounds, key=lambda one: -one.seconds)
    found = [("this plan", "", cost), *((b.proved_by, b.plans, b.seconds) for b in ordered)]
    return [
        {
            "proved_by": who,
            "plans": plans,
            "kind": "problem",
            "text": format_seconds(seconds),
            "percent": f"{100 * min(1.0, seconds / (cost or 1.0)):.2f}",
        }
        for who, plans, seconds in found
    ]


def drawing(plan: OperatorPlan) -> Drawing:
    """The timeline, with the critical path marked."""
    unit, scale = time_unit(end_of(plan))
    rows = lanes(plan, None)
    kinds = {kind: BarKind(kind, _COLOURS[kind], _DARK[kind]) for kind in _kinds(rows)}
    marks: tuple[Mark, ...] = ()
    if plan.certificate is not None:
        marks = (Mark(plan.certificate.bound_seconds, "proved lower bound"),)
    return Drawing(rows, kinds, end_of(plan), unit, scale, marks)


def chrome_trace(plan: OperatorPlan) -> str:
    """The placement in Chrome's trace event format; times in microseconds."""
    processes = {"device": (1, "devices"), "sends": (2, "transfers")}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in processes.values()
    ]
    for tid, row in enumerate(lanes(plan, None)):
        place = {"pid": processes[row.group][0], "tid": tid}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": row.name}})
        events += [
            {"ph": "X", "name": bar.name, "cat": bar.kind, **place, "ts": bar.start * 1e6,
             "dur": bar.seconds * 1e6, "args": {"critical": bar.critical}}
            for bar in row.bars
        ]  # fmt: skip
    return trace_text(plan, events)
