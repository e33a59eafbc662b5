"""Schedules of stages with given times, one above the other on one time axis: PNG and HTML.

Later chunks of a device, and the second direction, are drawn in lighter colours.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagewright.executor.drawing.chart import (
    DOTS_PER_INCH,
    MAX_HEIGHT_INCHES,
    WIDTH_INCHES,
    draw_legend,
    draw_row,
    save,
)
from stagewright.executor.drawing.figures import (
    MAX_FIGURE_PIXELS,
    MAX_LABELLED_BLOCKS,
    ROW_PIXELS,
    bars,
    new_figure,
)
from stagewright.executor.drawing.page import embed, render
from stagewright.executor.drawing.timeline import KIND_COLOURS, Block, Row, label_colour
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.schedules.timing import TimedOrder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Bar, Figure

TEMPLATE = "schedules.html.jinja"
ROW_INCHES = 0.22
LIGHTEST = 0.42  # share of white in the colour of a device's last chunk
BOUND_COLOUR = "#b02a30"


@dataclass(frozen=True, slots=True)
class Panel:
    """A schedule: ``rows`` of devices and the ``shades`` of their blocks, 0 to 1.

    ``bound`` is a lower bound on its end, if one is drawn.
    """

    title: str
    rows: tuple[Row, ...]
    shades: tuple[tuple[float, ...], ...]
    bound: float | None


def panel(title: str, timed: TimedOrder, bound: float | None = None) -> Panel:
    """The rows of a schedule."""
    rows = [
        tuple(
            Block(action, start, start + timed.times.of(action))
            for action, start in zip(row, starts, strict=True)
        )
        for row, starts in zip(timed.order.rows, timed.starts, strict=True)
    ]
    named = tuple(Row(f"device {d}", "device", blocks) for d, blocks in enumerate(rows))
    return Panel(title, named, tuple(_shades(timed, d) for d in range(len(rows))), bound)


def schedules_png(panels: Sequence[Panel]) -> bytes:
    """A PNG of the schedules."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = min(MAX_HEIGHT_INCHES, 1.1 + ROW_INCHES * _lines(panels))
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for y, one in _placed(panels):
        axes.text(0, y, one.title, va="center", fontsize=9, fontweight="bold")
        for i, (row, shades) in enumerate(zip(one.rows, one.shades, strict=True), start=1):
            pairs = zip(row.blocks, shades, strict=True)
            colours = [_colour(block.action.kind, shade) for block, shade in pairs]
            draw_row(axes, y + i, row, 1.0, _end(panels), colours)
        if one.bound is not None:
            axes.vlines(one.bound, y + 0.5, y + len(one.rows) + 0.5, color=BOUND_COLOUR, lw=1.2,
                        ls="--")  # fmt: skip
    _dress(axes, panels)
    bounded = any(one.bound is not None for one in panels)
    draw_legend(axes, [row for one in panels for row in one.rows], bounded)
    return save(figure)


def schedules_page(
    title: str,
    subtitle: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    panels: Sequence[Panel],
) -> str:
    """A self-contained page with a table, whose text columns begin with ``<``, and the drawing."""
    return render(
        TEMPLATE,
        title=title,
        subtitle=subtitle,
        head=head,
        rows=rows,
        heading="One row per device",
        figure=embed(_figure(panels), buttons=True),
    )


def _figure(panels: Sequence[Panel]) -> "Figure":
    lines = _lines(panels)
    figure = new_figure("schedules", min(MAX_FIGURE_PIXELS, 120 + ROW_PIXELS * lines))
    for y, one in _placed(panels):
        figure.add_annotation(x=0, y=y, text=f"<b>{one.title}</b>", showarrow=False, xanchor="left")
        if one.bound is not None:
            sides = {"x0": one.bound, "x1": one.bound, "y0": y + 0.5, "y1": y + len(one.rows) + 0.5}
            line = {"color": BOUND_COLOUR, "dash": "dash", "width": 1.5}
            figure.add_shape(type="line", **sides, line=line)
    figure.add_traces(_traces(panels))
    ticks = _ticks(panels)
    figure.update_layout(barmode="overlay", bargap=0, hovermode="closest")
    figure.update_xaxes(title="time", range=[0, _end(panels) * 1.01 or 1.0])
    figure.update_yaxes(
        tickvals=[*ticks],
        ticktext=[*ticks.values()],
        range=[lines - 0.4, -0.6],
        fixedrange=True,
        showgrid=False,
        zeroline=False,
    )
    return figure


def _traces(panels: Sequence[Panel]) -> "list[Bar]":
    """The bars by kind and shade, with one entry per kind in the legend."""
    found: dict[tuple[ActionKind, float], list[tuple[int, Row, Block]]] = {}
    for y, one in _placed(panels):
        for i, (row, shades) in enumerate(zip(one.rows, one.shades, strict=True), start=1):
            for block, shade in zip(row.blocks, shades, strict=True):
                found.setdefault((block.action.kind, shade), []).append((y + i, row, block))
    labelled = sum(map(len, found.values())) <= MAX_LABELLED_BLOCKS
    order = [*KIND_COLOURS]
    traces, named = [], set()
    for kind, shade in sorted(found, key=lambda key: (order.index(key[0]), key[1])):
        colour = _colour(kind, shade)
        trace = bars(kind, found[kind, shade], "", 1.0, labelled)
        trace.update(
            marker_color=colour,
            textfont_color=label_colour(colour),
            legendgroup=kind.value,
            showlegend=kind not in named,
        )
        traces.append(trace)
        named.add(kind)
    return traces


def _dress(axes: "Axes", panels: Sequence[Panel]) -> None:
    ticks = _ticks(panels)
    axes.set_yticks([*ticks], [*ticks.values()], fontsize=8)
    axes.set_ylim(_lines(panels) - 0.4, -0.6)
    axes.set_xlim(0, _end(panels) * 1.005 or 1.0)
    axes.set_xlabel("time")
    axes.tick_params(length=0)
    axes.grid(axis="x", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _placed(panels: Sequence[Panel]) -> Iterator[tuple[int, Panel]]:
    """Every schedule with the line of its title; its rows follow."""
    y = 0
    for one in panels:
        yield y, one
        y += 1 + len(one.rows)


def _lines(panels: Sequence[Panel]) -> int:
    return sum(1 + len(one.rows) for one in panels)


def _ticks(panels: Sequence[Panel]) -> dict[int, str]:
    """The name of every device by its line."""
    return {y + i: row.name for y, one in _placed(panels) for i, row in enumerate(one.rows, 1)}


def _end(panels: Sequence[Panel]) -> float:
    blocks = (block for one in panels for row in one.rows for block in row.blocks)
    return max(block.finish_seconds for block in blocks)


def _shades(timed: TimedOrder, device: int) -> tuple[float, ...]:
    """How light the blocks of a device are: chunks in their order, directions in theirs."""
    row, path_of = timed.order.rows[device], timed.order.path_of
    parts = [(path_of[action.microbatch or 0], action.stage) for action in row]
    ranks = {part: rank for rank, part in enumerate(sorted(set(parts)))}
    return tuple(ranks[part] / max(1, len(ranks) - 1) for part in parts)


def _colour(kind: ActionKind, shade: float) -> str:
    colour, white = KIND_COLOURS[kind], LIGHTEST * shade
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)
