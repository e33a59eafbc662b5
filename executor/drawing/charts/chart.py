"""A plan's timeline as a PNG picture."""

from collections import defaultdict
from collections.abc import Sequence
from heapq import nlargest
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from stagewright.executor.drawing.charts.figures import (
    MAX_HEIGHT_INCHES,
    bare_rows,
    new_figure,
    save,
    stacked_axes,
)
from stagewright.executor.drawing.colours import (
    BAND_COLOUR,
    CRITICAL_COLOUR,
    IDLE_COLOUR,
    KIND_COLOURS,
    KIND_NAMES,
    label_colour,
)
from stagewright.executor.drawing.lanes import (
    BOUND,
    CAUSES,
    Gap,
    critical_actions,
    idle_of,
    is_bottleneck,
    timed,
)
from stagewright.executor.drawing.periods import finish_seconds, phases
from stagewright.executor.drawing.timeline import (
    MAX_DEVICE_ROWS,
    Block,
    Row,
    fold,
    headline,
    numbers_note,
    row_note,
    time_unit,
    timeline,
)
from stagewright.executor.simulation.explanation import (
    PlanExplanation,
    explain_plan,
    explanation_sentences,
)
from stagewright.executor.simulation.idle import IdleCause
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.units import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_INCHES = 14.0
MARGIN = 0.003  # left of the headline, of the width
CHARACTER_SHARE = 0.0055  # fraction of the axis' width that one character of a block's label needs
ROW_INCHES = 0.26
_ROW_SPACE = {"device": 1.0, "channel": 0.5, "reduce": 0.5}  # of a row, in ROW_INCHES
_ROW_HEIGHT = {"device": 0.86, "channel": 0.4, "reduce": 0.4}  # of its blocks
_LABEL_POINTS = {"device": 7, "channel": 5.5, "reduce": 5.5}
_MIN_LINK_ROWS = 8  # that are always drawn; of more, the busiest up to half the rows of devices
_HEADING_ROWS = 1.0  # height of the period names above the rows, in row heights
STRIP = 0.12  # height of the mark of the critical path
MAX_OUTLINED_BLOCKS = 120  # per row; white outlines around more would hide the thin ones


def png(plan: PipelinePlan) -> bytes:
    """The schedule as a PNG: a row per device (or stage), channel and all-reduce."""
    ((rows, note),) = _rows([plan])
    found = explain_plan(plan)
    height = min(MAX_HEIGHT_INCHES, 2.1 + ROW_INCHES * _space(rows))
    figure = new_figure(WIDTH_INCHES, height)
    axes = figure.add_subplot()
    unit, scale = time_unit(finish_seconds(plan))
    _draw_rows(axes, rows, found, scale, finish_seconds(plan))
    is_bounded = _draw_bound(axes, plan, scale)
    _dress(axes, plan, rows, unit, scale, note)
    _mark_bottleneck(axes, rows, found)
    figure.suptitle(headline(plan), x=MARGIN, ha="left", fontsize=11, wrap=True)
    for sentence in explanation_sentences(plan, found)[:1]:
        axes.set_title(sentence, loc="left", fontsize=8.5, wrap=True)
    _draw_phases(axes, plan, scale)
    draw_legend(axes, rows, is_bounded, found)
    return save(figure)


def _rows(plans: Sequence[PipelinePlan]) -> list[tuple[tuple[Row, ...], str]]:
    """The rows of each plan with a note on them.

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
    if len(busy) <= most:
        return drawn
    kept = nlargest(most, busy, key=busy.__getitem__)
    left_out = f"the {most} busiest of {len(busy)} channels and all-reduces"
    return [
        (
            tuple(row for row in rows if row.group == "device" or row.name in kept),
            " · ".join(filter(None, [note, left_out])),
        )
        for rows, note in drawn
    ]


def _devices(rows: Sequence[Row]) -> int:
    return sum(row.group == "device" for row in rows)


def _space(rows: Sequence[Row]) -> float:
    """The height of all rows, in heights of a device's row."""
    return sum(_ROW_SPACE[row.group] for row in rows)


def _middles(rows: Sequence[Row]) -> list[float]:
    """The middle of every row; the first is at 0."""
    spaces = [_ROW_SPACE[row.group] for row in rows]
    ends = accumulate(spaces, initial=-0.5)
    return [end + space / 2 for end, space in zip(ends, spaces, strict=False)]


def _draw_rows(
    axes: "Axes", rows: Sequence[Row], found: PlanExplanation | None, scale: float, finish: float
) -> None:
    """Blocks, idle intervals, and the critical path at the foot of its rows."""
    critical, idle = critical_actions(found), idle_of(rows, found)
    for y, row, gaps in zip(_middles(rows), rows, idle, strict=True):
        _draw_idle(axes, y, gaps, scale, finish)
        draw_row(axes, y, row, scale, finish)
        spans = [
            (block.start_seconds * scale, (block.finish_seconds - block.start_seconds) * scale)
            for block in row.blocks
            if timed(block) in critical
        ]
        foot = y + _ROW_HEIGHT[row.group] / 2
        axes.broken_barh(spans, (foot - 0.04, STRIP), facecolors=CRITICAL_COLOUR, zorder=3)


def _draw_idle(axes: "Axes", y: float, gaps: Sequence[Gap], scale: float, finish: float) -> None:
    """Hatched intervals, named by their cause where there is room."""
    axes.broken_barh(
        [(start * scale, (end - start) * scale) for start, end, _ in gaps],
        (y - 0.3, 0.6),
        facecolors="none",
        edgecolors=IDLE_COLOUR,
        linewidth=0,
        hatch="/////",
        zorder=0.9,
    )
    for start, end, cause in gaps:
        name = CAUSES[IdleCause(cause)]
        if end - start >= CHARACTER_SHARE * (len(name) + 2) * finish:
            axes.text((start + end) / 2 * scale, y, name, ha="center", va="center", fontsize=6,
                      color="#566271",
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip


def _mark_bottleneck(axes: "Axes", rows: Sequence[Row], found: PlanExplanation | None) -> None:
    """Its name in bold letters."""
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        if is_bottleneck(row, found):
            label.set_fontweight("bold")


def draw_row(
    axes: "Axes",
    y: float,
    row: Row,
    scale: float,
    finish: float,
    colours: Sequence[str] | None = None,
) -> None:
    """Draw the blocks of ``row`` at height ``y``, by default in the colours of their kinds."""
    height = _ROW_HEIGHT[row.group]
    colours = colours or [KIND_COLOURS[block.action.kind] for block in row.blocks]
    # White outlines separate computations; outlines in their own colour keep transfers visible.
    computes = row.group == "device"
    in_turn = row.group == "reduce" and len(row.blocks) > 1
    white = [computes or (in_turn and _fits(block, block.label, finish)) for block in row.blocks]
    edges = ["white" if one else own for one, own in zip(white, colours, strict=True)]
    width = 0.4 if len(row.blocks) <= MAX_OUTLINED_BLOCKS else 0
    axes.broken_barh(
        [
            (block.start_seconds * scale, (block.finish_seconds - block.start_seconds) * scale)
            for block in row.blocks
        ],
        (y - height / 2, height),
        facecolors=colours,
        edgecolors=edges,
        linewidth=width if computes else 0.8,
    )
    if not (computes or in_turn):
        return
    one_stage = len({block.action.stage for block in row.blocks}) == 1
    for block, colour in zip(row.blocks, colours, strict=True):
        texts = [block.label, *([block.label.rpartition(".")[2]] if one_stage else [])]
        label = next((text for text in texts if _fits(block, text, finish)), "")
        if label:
            middle = (block.start_seconds + block.finish_seconds) / 2 * scale
            axes.text(middle, y, label, ha="center", va="center", fontsize=_LABEL_POINTS[row.group],
                      color=label_colour(colour))  # fmt: skip


def _fits(block: Block, label: str, finish: float) -> bool:
    lasting = block.finish_seconds - block.start_seconds
    return lasting > 0 and lasting >= CHARACTER_SHARE * len(label) * finish


def _draw_bound(axes: "Axes", plan: PipelinePlan, scale: float) -> bool:
    """Draw the bound on an iteration, if the time axis is one iteration."""
    if plan.certificate is None or phases(plan) is not None:
        return False
    at = plan.certificate.bound_seconds * scale
    axes.axvline(at, color=CRITICAL_COLOUR, lw=1.2, ls="--")
    return True


def _draw_phases(axes: "Axes", plan: PipelinePlan, scale: float) -> None:
    """Mark the periods of a periodic plan's run, and name them above the rows."""
    shown = phases(plan)
    if shown is None:
        return
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top - _HEADING_ROWS)
    axes.vlines([at * scale for at in shown.bounds], top, bottom, zorder=0.6,
                color="#8593a3", lw=0.9, ls=(0, (2, 2)))  # fmt: skip
    for i, (name, begin, end) in enumerate(shown.headings):
        if i == 0:
            axes.axvspan(begin * scale, end * scale, color=BAND_COLOUR, lw=0, zorder=0.4)
        axes.text((begin + end) / 2 * scale, top - _HEADING_ROWS / 2, name, ha="center",
                  va="center", fontsize=8, color="#3c4a5a")  # fmt: skip


def _dress(
    axes: "Axes", plan: PipelinePlan, rows: tuple[Row, ...], unit: str, scale: float, note: str
) -> None:
    axes.set_yticks(_middles(rows), [_row_name(row) for row in rows], fontsize=8)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontsize(8 if row.group == "device" else 6.5)
    axes.set_xlim(0, finish_seconds(plan) * scale * 1.005 or 1.0)
    said = [f"time in {unit}", *filter(None, [note]), numbers_note(plan)]
    axes.set_xlabel(" · ".join(said))
    bare_rows(axes, _space(rows))


def _row_name(row: Row) -> str:
    count = len(row.devices)
    return f"{row.name} · {counted(count, 'device', 'devices')}" if count > 1 else row.name


def draw_legend(
    axes: "Axes", rows: Sequence[Row], bounded: bool, found: PlanExplanation | None = None
) -> None:
    """Draw the legend of the kinds of actions in ``rows``."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {block.action.kind for row in rows for block in row.blocks}
    handles: list[Patch | Line2D] = [
        Patch(color=colour, label=KIND_NAMES[kind])
        for kind, colour in KIND_COLOURS.items()
        if kind in kinds
    ]
    if found is not None and found.path:
        handles.append(Line2D([], [], color=CRITICAL_COLOUR, lw=2.5, label="critical path"))
    if found is not None:
        idle = Patch(facecolor="none", edgecolor=IDLE_COLOUR, hatch="/////", lw=0, label="idle")
        handles.append(idle)
    if bounded:
        handles.append(Line2D([], [], color=CRITICAL_COLOUR, ls="--", label=BOUND))
    axes.figure.legend(
        handles=handles, loc="outside lower center", ncols=11, frameon=False, fontsize=8
    )


def stacked_png(plans: Sequence[PipelinePlan], titles: Sequence[str]) -> bytes:
    """A PNG of the schedules one above the other on one time axis: predicted over measured."""
    drawn, note = zip(*_rows(plans), strict=True)
    found = [explain_plan(plan) for plan in plans]
    heights = [1.0 + ROW_INCHES * _space(rows) for rows in drawn]
    column = stacked_axes(WIDTH_INCHES, heights)
    last = max(finish_seconds(plan) for plan in plans)
    unit, scale = time_unit(last)
    is_bounded = False
    for i, (axes, plan, rows, title) in enumerate(zip(column, plans, drawn, titles, strict=True)):
        _draw_rows(axes, rows, found[i], scale, last)
        is_bounded |= _draw_bound(axes, plan, scale)
        _dress(axes, plan, rows, unit, scale, note[i])
        _mark_bottleneck(axes, rows, found[i])
        axes.set_title(title, fontsize=11, loc="left", wrap=True)
        axes.set_xlim(0, last * scale * 1.005 or 1.0)
        axes.label_outer()
    draw_legend(column[-1], [row for rows in drawn for row in rows], is_bounded, found[0])
    return save(column[-1].figure)
