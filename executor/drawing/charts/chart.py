"""Drawings of lanes as PNG pictures, one above the other on one time axis."""

from collections import defaultdict
from collections.abc import Sequence
from heapq import nlargest
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from stagewright.executor.drawing.charts.figures import bare_rows, save, stacked_axes
from stagewright.executor.drawing.colours import (
    BAND_COLOUR,
    CRITICAL_COLOUR,
    IDLE_COLOUR,
    label_colour,
)
from stagewright.executor.drawing.lanes import Bar, Drawing, Lane, Mark, TimeBand, plan_drawing
from stagewright.executor.drawing.timeline import (
    MAX_DEVICE_ROWS,
    Row,
    fold,
    headline,
    numbers_note,
    row_note,
    timeline,
)
from stagewright.executor.simulation.explanation import explain_plan, explanation_sentences
from stagewright.formulations.plans.plan import PipelinePlan

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

WIDTH_INCHES = 14.0
MARGIN = 0.003  # left of the headline, of the width
CHARACTER_SHARE = 0.0055  # fraction of the axis' width that one character of a bar's label needs
ROW_INCHES = 0.26
_LINK_SPACE, _LINK_HEIGHT = 0.5, 0.4  # of a lane of no device, in ROW_INCHES, and of its bars
_DEVICE_HEIGHT = 0.86
_MIN_LINK_ROWS = 8  # that are always drawn; of more, the busiest up to half the rows of devices
_HEADING_ROWS = 1.0  # height of the names of intervals above the lanes, in row heights
_STRIP = 0.12  # height of the mark of the critical path
_MAX_OUTLINED = 120  # bars of a lane; white outlines around more would hide the thin ones
_LEAST_CHARACTERS = 4  # of a name that is cut to the room on its bar
_FULL = ("device", "title")  # groups of lanes of the full height


def png(plan: PipelinePlan) -> bytes:
    """The schedule as a PNG: a row per device (or stage), channel and all-reduce."""
    sentences = explanation_sentences(plan, explain_plan(plan))
    return lanes_png(*_of_plans([plan]), sentences[:1] or [""], headline(plan))


def stacked_png(plans: Sequence[PipelinePlan], titles: Sequence[str]) -> bytes:
    """A PNG of the schedules one above the other on one time axis: predicted over measured."""
    return lanes_png(*_of_plans(plans), titles)


def _of_plans(plans: Sequence[PipelinePlan]) -> tuple[list[Drawing], list[str]]:
    """The drawing of each plan, and notes on them.

    Identical devices are one row, or a stage's where too many differ. Of many channels and
    all-reduces all plans have the busiest ones.
    """
    drawn = []
    for plan in plans:
        rows, note = fold(timeline(plan, max_device_rows=None)), ""
        if _devices(rows) > MAX_DEVICE_ROWS:
            rows, note = timeline(plan), row_note(plan)
        drawn.append((rows, note))
    busy = defaultdict[str, float](float)
    for row in chain.from_iterable(rows for rows, _ in drawn):
        if row.group != "device":
            busy[row.name] += sum(one.finish_seconds - one.start_seconds for one in row.blocks)
    most = max(_MIN_LINK_ROWS, max(_devices(rows) for rows, _ in drawn) // 2)
    kept = nlargest(most, busy, key=busy.__getitem__)
    few = f"the {most} busiest of {len(busy)} channels and all-reduces" * (len(busy) > most)
    shown = [
        [row for row in rows if row.group == "device" or row.name in kept] for rows, _ in drawn
    ]
    return (
        [
            plan_drawing(plan, explain_plan(plan), rows)
            for plan, rows in zip(plans, shown, strict=True)
        ],
        [
            " · ".join(filter(None, [note, few, numbers_note(plan)]))
            for plan, (_, note) in zip(plans, drawn, strict=True)
        ],
    )


def _devices(rows: Sequence[Row]) -> int:
    return sum(row.group == "device" for row in rows)


def lanes_png(
    drawings: Sequence[Drawing], notes: Sequence[str], titles: Sequence[str], head: str = ""
) -> bytes:
    """A PNG of drawings with titles, and notes below them; ``head`` is above all."""
    column = stacked_axes(WIDTH_INCHES, [1.0 + ROW_INCHES * sum(_spaces(one)) for one in drawings])
    longest = max(drawings, key=lambda one: one.end)
    unit, scale, end = longest.unit, longest.scale, longest.end
    for axes, drawing, note, title in zip(column, drawings, notes, titles, strict=True):
        for y, lane in zip(_middles(drawing), drawing.lanes, strict=True):
            _draw_idle(axes, y, lane, drawing, scale, end)
            _draw_lane(axes, y, lane, drawing, scale, end)
        _dress(axes, drawing)
        for mark in drawing.marks:
            _draw_mark(axes, mark, scale)
        _draw_bands(axes, drawing.bands, scale)
        axes.set_xlim(0, end * scale * 1.005 or 1.0)
        axes.set_xlabel(" · ".join(filter(None, [f"time in {unit}" if unit else "time", note])))
        axes.set_title(title, fontsize=8.5 if head else 11, loc="left", wrap=True)
        axes.label_outer()
    figure = column[-1].figure
    if head:
        figure.suptitle(head, x=MARGIN, ha="left", fontsize=11, wrap=True)
    figure.legend(
        handles=_legend(drawings), loc="outside lower center", ncols=11, frameon=False, fontsize=8
    )
    return save(figure)


def _spaces(drawing: Drawing) -> list[float]:
    """The height of every lane, in heights of a device's."""
    return [1.0 if lane.group in _FULL else _LINK_SPACE for lane in drawing.lanes]


def _middles(drawing: Drawing) -> list[float]:
    """The middle of every lane; the first is at 0."""
    spaces = _spaces(drawing)
    ends = accumulate(spaces, initial=-0.5)
    return [end + space / 2 for end, space in zip(ends, spaces, strict=False)]


def _draw_lane(
    axes: "Axes", y: float, lane: Lane, drawing: Drawing, scale: float, end: float
) -> None:
    """Bars with what is written on them, and the critical path at their foot."""
    if lane.group == "title":
        axes.text(0, y, lane.name, va="center", fontsize=9, fontweight="bold")
        return
    computes = lane.group == "device"
    height = _DEVICE_HEIGHT if computes else _LINK_HEIGHT
    colours = [drawing.kinds[bar.kind].light for bar in lane.bars]
    texts = [_text(bar, lane, end) for bar in lane.bars]
    # White outlines separate computations; outlines in their own colour keep transfers visible.
    edges = ["white" if computes or text else own for text, own in zip(texts, colours, strict=True)]
    width = 0.4 if len(lane.bars) <= _MAX_OUTLINED else 0
    axes.broken_barh(
        [(bar.start * scale, bar.seconds * scale) for bar in lane.bars],
        (y - height / 2, height),
        facecolors=colours,
        edgecolors=edges,
        linewidth=width if computes else 0.8,
    )
    axes.broken_barh(
        [(bar.start * scale, bar.seconds * scale) for bar in lane.bars if bar.critical],
        (y + height / 2 - 0.04, _STRIP),
        facecolors=CRITICAL_COLOUR,
        zorder=3,
    )
    for bar, text, colour in zip(lane.bars, texts, colours, strict=True):
        if text:
            axes.text((bar.start + bar.finish) / 2 * scale, y, text, ha="center", va="center",
                      fontsize=7 if computes else 5.5, color=label_colour(colour))  # fmt: skip


def _text(bar: Bar, lane: Lane, end: float) -> str:
    """What there is room for on a bar: its label, of one stage the microbatch, or a cut name."""
    if lane.group == "channel" or (lane.group == "reduce" and len(lane.bars) == 1):
        return ""
    room = int(bar.seconds / (CHARACTER_SHARE * end)) if end else 0
    texts = [bar.label]
    if len(lane.stages) == 1 or lane.group == "reduce":
        texts.append(bar.label.rpartition(".")[2])
    if bar.label == bar.name and room >= _LEAST_CHARACTERS:
        texts.append(f"{bar.label[: room - 1]}…")
    return next((text for text in texts if len(text) <= room), "")


def _draw_idle(
    axes: "Axes", y: float, lane: Lane, drawing: Drawing, scale: float, end: float
) -> None:
    """Hatched intervals, named by their cause where there is room."""
    axes.broken_barh(
        [(start * scale, (stop - start) * scale) for start, stop, _ in lane.idle],
        (y - 0.3, 0.6),
        facecolors="none",
        edgecolors=IDLE_COLOUR,
        linewidth=0,
        hatch="/////",
        zorder=0.9,
    )
    for start, stop, cause in lane.idle:
        name = (drawing.causes or {})[cause]
        if stop - start >= CHARACTER_SHARE * (len(name) + 2) * end:
            axes.text((start + stop) / 2 * scale, y, name, ha="center", va="center", fontsize=6,
                      color="#566271",
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip


def _dress(axes: "Axes", drawing: Drawing) -> None:
    """Names of the lanes, those of the busiest resource in bold letters."""
    named = [
        (y, lane)
        for y, lane in zip(_middles(drawing), drawing.lanes, strict=True)
        if lane.group != "title"
    ]
    axes.set_yticks([y for y, _ in named], [lane.name for _, lane in named])
    for label, (_, lane) in zip(axes.get_yticklabels(), named, strict=True):
        label.set_fontsize(8 if lane.group == "device" else 6.5)
        label.set_fontweight("bold" if lane.bottleneck else "normal")
    bare_rows(axes, sum(_spaces(drawing)))


def _draw_mark(axes: "Axes", mark: Mark, scale: float) -> None:
    """A line at a bound, which has a name, or at the start of a period."""
    if not mark.name:
        axes.axvline(mark.at * scale, color="#8593a3", lw=0.9, ls=(0, (2, 2)), zorder=0.6)
        return
    bottom, top = axes.get_ylim()
    first, stop = mark.lanes or (top + 0.5, bottom + 0.5)
    axes.vlines(mark.at * scale, first - 0.5, stop - 0.5, color=CRITICAL_COLOUR, lw=1.2, ls="--")


def _draw_bands(axes: "Axes", bands: Sequence[TimeBand], scale: float) -> None:
    """Names of intervals above the lanes."""
    if not bands:
        return
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top - _HEADING_ROWS)
    for one in bands:
        if one.shaded:
            axes.axvspan(one.start * scale, one.finish * scale, color=BAND_COLOUR, lw=0, zorder=0.4)
        axes.text((one.start + one.finish) / 2 * scale, top - _HEADING_ROWS / 2, one.name,
                  ha="center", va="center", fontsize=8, color="#3c4a5a")  # fmt: skip


def _legend(drawings: Sequence[Drawing]) -> "list[Artist]":
    """The kinds of bars that there are, the critical path, idle time, and bounds."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    lanes = [lane for one in drawings for lane in one.lanes]
    used = {bar.kind for lane in lanes for bar in lane.bars}
    kinds: dict[str, str] = {}
    for key, kind in chain.from_iterable(one.kinds.items() for one in drawings):
        if key in used:
            kinds.setdefault(kind.name, kind.light)
    found: list[Artist] = [Patch(color=colour, label=name) for name, colour in kinds.items()]
    if any(bar.critical for lane in lanes for bar in lane.bars):
        found.append(Line2D([], [], color=CRITICAL_COLOUR, lw=2.5, label="critical path"))
    if any(lane.idle for lane in lanes):
        idle = Patch(facecolor="none", edgecolor=IDLE_COLOUR, hatch="/////", lw=0, label="idle")
        found.append(idle)
    for name in dict.fromkeys(mark.name for one in drawings for mark in one.marks if mark.name):
        found.append(Line2D([], [], color=CRITICAL_COLOUR, ls="--", label=name))
    return found
