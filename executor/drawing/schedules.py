"""Schedules one above the other on one time axis, and their cost by memory: PNG and HTML.

Later chunks of a device, and the second direction, are drawn in lighter colours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stagewright.executor.drawing.charts.chart import lanes_png
from stagewright.executor.drawing.charts.figures import (
    bare,
    new_figure,
    save,
)
from stagewright.executor.drawing.colours import (
    CATEGORIES,
    CRITICAL_COLOUR,
    DARK_COLOURS,
    KIND_COLOURS,
    KIND_NAMES,
    mixed,
)
from stagewright.executor.drawing.lanes import BOUND, Bar, BarKind, Drawing, Lane, Mark, block_bar
from stagewright.executor.drawing.timeline import Block, Row
from stagewright.executor.drawing.web.render import Chart, Series, render
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.schedules.timing import TimedOrder

if TYPE_CHECKING:
    pass


HEIGHT_PIXELS = 460


@dataclass(frozen=True, slots=True)
class Curve:
    """``cost`` and ``bound`` (named ``cost_name``) per limit in ``memory``.

    ``others`` are schedules to compare with: name, memory, cost.
    """

    memory: tuple[float, ...]
    cost: tuple[float, ...]
    bound: tuple[float, ...]
    cost_name: str
    others: tuple[tuple[str, float, float], ...]

    def shown(self) -> list[tuple[str, float, float]]:
        """The published schedules near the curve; schedules at one point share a label."""
        places: dict[tuple[float, float], str] = {}
        for name, memory, cost in self.others:
            if memory <= 1.1 * self.memory[-1] and cost <= 1.1 * self.cost[0]:
                known = places.get((memory, cost))
                places[memory, cost] = f"{known}, {name}" if known else name
        return [(name, memory, cost) for (memory, cost), name in places.items()]


def curve_png(curve: Curve) -> bytes:
    """A PNG of the curve, its bound and the others."""
    figure = new_figure()
    axes = figure.add_subplot()
    for costs, colour, label, style in (
        (curve.cost, CATEGORIES[0], "best schedule", "o-"),
        (curve.bound, CRITICAL_COLOUR, "proved lower bound", "--"),
    ):
        axes.step(curve.memory, costs, style, where="post", color=colour, label=label, ms=4)
    for name, memory, cost in curve.shown():
        axes.plot(memory, cost, "D", color=CATEGORIES[-1], ms=5)
        axes.annotate(name, (memory, cost), (5, 4), textcoords="offset points", fontsize=8)
    axes.set_xlabel("limit of memory on every device")
    axes.set_ylabel(curve.cost_name)
    axes.legend(frameon=False)
    bare(axes, "both")
    return save(figure)


def curve_page(
    curve: Curve, subtitle: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """A self-contained page with a table, whose text columns begin with ``<``, and the curve."""
    return render(
        TEMPLATE,
        title=f"Memory and {curve.cost_name}",
        subtitle=subtitle,
        head=head,
        rows=rows,
        heading="Schedules and bounds",
        timeline=None,
        chart=curve_chart(curve),
    )


def curve_chart(curve: Curve) -> Chart:
    """The curve, its bound and the published schedules, as pages draw them."""
    series = [
        Series("best schedule", curve.memory, curve.cost, colour="--best"),
        Series("proved lower bound", curve.memory, curve.bound, "dashes", "--critical"),
    ]
    shown = curve.shown()
    if shown:
        names, memory, costs = zip(*shown, strict=True)
        series.append(
            Series("published schedules", memory, costs, "points", "--other", names=names)
        )
    return Chart("limit of memory on every device", curve.cost_name, tuple(series), HEIGHT_PIXELS)


TEMPLATE = "schedules.html.jinja"
_LIGHTEST = 0.42  # share of white in the colour of a device's last chunk


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
    return lanes_png([schedules_drawing(panels)], [""], [""])


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
        timeline=schedules_drawing(panels),
    )


def schedules_drawing(panels: Sequence[Panel]) -> Drawing:
    """A lane per device, below one with the schedule's name."""
    lanes, kinds, marks = list[Lane](), dict[str, BarKind](), list[Mark]()
    for one in panels:
        lanes.append(Lane(one.title, "title", ()))
        if one.bound is not None:
            marks.append(Mark(one.bound, BOUND, (len(lanes), len(lanes) + len(one.rows))))
        for row, shades in zip(one.rows, one.shades, strict=True):
            bars = [_bar(block, shade) for block, shade in zip(row.blocks, shades, strict=True)]
            lanes.append(Lane(row.name, row.group, tuple(bars)))
            kinds |= {
                bar.kind: _kind(block.action.kind, shade)
                for bar, block, shade in zip(bars, row.blocks, shades, strict=True)
            }
    # In the order of the legend: kinds, then from the darkest to the lightest.
    order = [str(kind) for kind in KIND_COLOURS]
    ordered = sorted(kinds, key=lambda key: (order.index(key.split(" ")[0]), float(key.split()[1])))
    return Drawing(
        tuple(lanes), {key: kinds[key] for key in ordered}, _end(panels), marks=tuple(marks)
    )


def _bar(block: Block, shade: float) -> Bar:
    bar = block_bar(block)
    return replace(bar, kind=f"{bar.kind} {shade}")


def _kind(kind: ActionKind, shade: float) -> BarKind:
    dark = mixed(DARK_COLOURS[kind], "#ffffff", _LIGHTEST * shade)
    return BarKind(KIND_NAMES[kind], _colour(kind, shade), dark)


def _end(panels: Sequence[Panel]) -> float:
    blocks = (block for one in panels for row in one.rows for block in row.blocks)
    return max(block.finish_seconds for block in blocks)


def _shades(timed: TimedOrder, device: int) -> tuple[float, ...]:
    """Lightness of a device's blocks: by chunk, or by direction."""
    row, path_of = timed.order.rows[device], timed.order.path_of
    parts = [(path_of[action.microbatch or 0], action.stage) for action in row]
    ranks = {part: rank for rank, part in enumerate(sorted(set(parts)))}
    return tuple(ranks[part] / max(1, len(ranks) - 1) for part in parts)


def _colour(kind: ActionKind, shade: float) -> str:
    return mixed(KIND_COLOURS[kind], "#ffffff", _LIGHTEST * shade)
