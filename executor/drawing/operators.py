"""Drawings of a placement of operators: rows for each device and for its transfers."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from stagewright.executor.drawing.charts.chart import lanes_png
from stagewright.executor.drawing.chrome import process_names, trace_text
from stagewright.executor.drawing.colours import (
    CRITICAL_COLOUR,
    DARK_COLOURS,
    KIND_COLOURS,
)
from stagewright.executor.drawing.lanes import Bar, BarKind, Drawing, Lane, Mark
from stagewright.executor.drawing.timeline import time_unit
from stagewright.executor.drawing.web.render import bound_bars, render
from stagewright.formulations.operators.plan import OperatorPlan, loads_of
from stagewright.formulations.plans.actions import ActionKind
from stagewright.graphs.documents.units import format_bytes, format_seconds

if TYPE_CHECKING:
    pass

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
_MOST_ROWS = 96  # with more, what devices send is left out


def lanes(plan: OperatorPlan, most: int | None) -> tuple[Lane, ...]:
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
    return lanes_png([drawing(plan, _MOST_ROWS) for plan in plans], [""] * len(plans), titles)


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
    rows = [("this plan", "", cost), *((b.proved_by, b.plans, b.seconds) for b in ordered)]
    return bound_bars(((who, plans, "problem", seconds) for who, plans, seconds in rows), cost)


def drawing(plan: OperatorPlan, most: int | None = None) -> Drawing:
    """The timeline, with the critical path marked, of at most so many rows."""
    unit, scale = time_unit(end_of(plan))
    rows = lanes(plan, most)
    kinds = {kind: BarKind(kind, _COLOURS[kind], _DARK[kind]) for kind in _kinds(rows)}
    marks: tuple[Mark, ...] = ()
    if plan.certificate is not None:
        marks = (Mark(plan.certificate.bound_seconds, "proved lower bound"),)
    return Drawing(rows, kinds, end_of(plan), unit, scale, marks)


def chrome_trace(plan: OperatorPlan) -> str:
    """The placement in Chrome's trace event format; times in microseconds."""
    processes = {"device": (1, "devices"), "sends": (2, "transfers")}
    events = process_names(processes)
    for tid, row in enumerate(lanes(plan, None)):
        place = {"pid": processes[row.group][0], "tid": tid}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": row.name}})
        events += [
            {"ph": "X", "name": bar.name, "cat": bar.kind, **place, "ts": bar.start * 1e6,
             "dur": bar.seconds * 1e6, "args": {"critical": bar.critical}}
            for bar in row.bars
        ]  # fmt: skip
    return trace_text(plan, events)
