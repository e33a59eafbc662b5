"""Tables and drawings of schedules in the terminal."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from stagewright.cli.console import out, percent, print_table, say

if TYPE_CHECKING:
    from rich.text import Text

    from stagewright.executor.drawing.schedules import Curve
    from stagewright.formulations.schedules.timing import TimedOrder
    from stagewright.service.schedules.requests import (
        MemoryCurve,
        ScheduleAnswer,
        ScheduleComparison,
        ScheduleFigures,
    )

FIGURES = (
    "<kind", "<placement", "chunks", "<status", "makespan", "span", "bubble", "idle", "memory",
    "bound", "gap",
)  # fmt: skip
CURVE_HEAD = ("memory", "makespan", "span", "bound", "gap", "<proved by", "<status")
_WIDE_ONLY = ("chunks", "<status", "span", "bound")  # columns of terminals of ...
WIDE = 100  # ... so many characters
_STYLES = {
    "F": "white on blue",
    "B": "black on green",
    "I": "black on cyan",
    "W": "black on yellow",
}


def print_schedule(answer: "ScheduleAnswer") -> None:
    """The figures and the drawing of a schedule, or why there is none."""
    if answer.timed is None:
        say(f"{answer.kind}: {answer.status}: {answer.reason}")
        return
    _print_figures(answer)
    say(f"bound by {answer.proved_by}, {answer.wall_seconds:.2f} s")
    say(*_drawing(answer.timed, out().width))


def print_comparison(answer: "ScheduleComparison", spelled: Callable[[str], str]) -> None:
    """The table of all schedules, and why kinds are not in it with the options ``spelled``."""
    if answer.schedules:
        _print_figures(*answer.schedules)
    say(*(f"without {one.kind}: {spelled(one.reason)}" for one in answer.refused))


def _print_figures(*schedules: "ScheduleFigures") -> None:
    shown = [i for i, name in enumerate(FIGURES) if out().width >= WIDE or name not in _WIDE_ONLY]
    rows = [cells(one) for one in schedules]
    print_table([FIGURES[i] for i in shown], [[row[i] for i in shown] for row in rows])


def cells(one: "ScheduleFigures") -> tuple[str, ...]:
    """The row of a schedule in a table with the head ``FIGURES``."""
    return (
        name_of(one), one.placement, "-" if one.chunks is None else str(one.chunks), one.status,
        f"{one.makespan:g}", f"{one.span:g}", percent(one.bubble), percent(one.idle),
        f"{one.peak_memory:g}", f"{one.bound:g}", percent(one.gap),
    )  # fmt: skip


def print_curve(answer: "MemoryCurve") -> None:
    """The table of the limits, and of the published kinds."""
    print_table(CURVE_HEAD, curve_cells(answer))
    cost = answer.objective
    say(
        *(
            f"{one.kind} has {cost} {getattr(one, cost):g} with peak memory {one.peak_memory:g}"
            for one in answer.kinds
        ),
        f"{answer.status}, {answer.wall_seconds:.2f} s",
    )


def curve_title(answer: "MemoryCurve") -> str:
    """What the curve is of, in one line."""
    chunks = f", {answer.chunks} chunks per device" if answer.chunks not in (None, 1) else ""
    return (
        f"{answer.stages} stages · {answer.microbatches} microbatches · "
        f"placement {answer.placement}{chunks} · {answer.status}"
    )


def drawn_curve(answer: "MemoryCurve") -> "Curve":
    """The curve to draw."""
    from stagewright.executor.drawing.schedules import Curve

    name = answer.objective
    points = [one.model_dump() for one in answer.points]
    memory, cost, bound = (tuple(one[key] for one in points) for key in ("memory", name, "bound"))
    kinds = [one.model_dump() for one in answer.kinds]
    others = tuple((one["kind"], one["peak_memory"], one[name]) for one in kinds)
    return Curve(memory, cost, bound, name, others)


def curve_cells(answer: "MemoryCurve") -> list[tuple[str, ...]]:
    """The rows of a curve in a table with the head ``CURVE_HEAD``."""
    return [
        (
            f"{one.memory:g}", f"{one.makespan:g}", f"{one.span:g}", f"{one.bound:g}",
            percent(one.gap), one.proved_by, one.status,
        )
        for one in answer.points
    ]  # fmt: skip


def name_of(one: "ScheduleFigures") -> str:
    """The kind, with those that have the same order."""
    return ", ".join((one.kind, *getattr(one, "same_as_kinds", ())))


def title_of(one: "ScheduleFigures") -> str:
    """The kind and its figures in one line."""
    chunks = f", {one.chunks} chunks" if one.chunks not in (None, 1) else ""
    return (
        f"{name_of(one)} ({one.placement}{chunks}): makespan {one.makespan:g}, "
        f"idle {percent(one.idle)}, peak memory {one.peak_memory:g}"
    )


def _drawing(timed: "TimedOrder", width: int) -> "list[Text]":
    """The schedule of each device as blocks to scale, if the terminal is wide enough."""
    from rich.text import Text

    rows = [_blocks(timed, d) for d in range(len(timed.starts))]
    shortest = min((length for row in rows for _, length, *_ in row if length > 0), default=0.0)
    if shortest == 0:
        return []
    place = "device" if any(len(set(path)) < len(path) for path in timed.order.paths) else "stage"
    place = "device" if len(timed.order.paths) > 1 else place
    left = len(f"{place} {len(rows) - 1}  ")
    makespan = timed.makespan()
    scale = (width - left) // makespan if makespan <= width - left else (width - left) / makespan
    if shortest * scale < 1:
        return [Text(f"a drawing to scale needs more than {width} columns")]
    lines = []
    for d, row in enumerate(rows):
        line = Text(f"{place} {d}".ljust(left))
        for start, duration, label, style in row:
            begin, end = (left + round(time * scale) for time in (start, start + duration))
            line.append("·" * (begin - len(line)))
            line.append(_label(label, end - begin), style)
        lines.append(line)
    return lines


_Block = tuple[float, float, str, str]  # start, duration, label, style


def _blocks(timed: "TimedOrder", device: int) -> list[_Block]:
    """The blocks of a device; the stage is named where a device has several."""
    row = timed.order.rows[device]
    several = len({action.stage for action in row}) > 1
    return [
        (
            start,
            timed.times.of(action),
            str(action) if several else f"{action.kind}{action.microbatch}",
            _STYLES[action.kind],
        )
        for action, start in zip(row, timed.starts[device], strict=True)
    ]


def _label(label: str, columns: int) -> str:
    """``label`` in a fixed number of columns; shortened to the microbatch's last digits."""
    text = label if len(label) < columns else label[-max(columns - 1, 1) :]
    return (text.ljust(columns - 1) + "|")[:columns]
