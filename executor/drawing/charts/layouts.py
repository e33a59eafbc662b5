"""Layouts, stages, trials and rate sets as PNG; rows have the fields of answers of the service."""

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any

from stagewright.executor.drawing.charts.figures import (
    MAX_HEIGHT_INCHES,
    bare,
    bare_rows,
    new_figure,
    save,
)
from stagewright.executor.drawing.colours import CATEGORIES, CRITICAL_COLOUR, MEMORY_COLOURS
from stagewright.graphs.documents.units import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDEST = 0.75  # positions left and right of the bars: the one of a single position is not a wall


def _limit(limit_bytes: float) -> dict[str, Any]:
    """The style and the label of the line at a device's memory."""
    label = f"a device has {limit_bytes / 1e9:g} GB"
    return {"color": CRITICAL_COLOUR, "lw": 1.5, "ls": "--", "label": label}


def memory_png(ranks: Sequence[Any], limit_bytes: float, title: str) -> bytes:
    """Bars of every rank's memory by kind (GB), and a line at the memory of a device."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure()
    axes = figure.add_subplot()
    places = [one.rank for one in ranks]
    below = [0.0] * len(ranks)
    for kind, colour in MEMORY_COLOURS.items():
        sizes = [getattr(one, f"{kind}_bytes") / 1e9 for one in ranks]
        axes.bar(places, sizes, bottom=below, color=colour, label=kind, width=0.8)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    axes.axhline(limit_bytes / 1e9, **_limit(limit_bytes))
    axes.set_xlabel("position in the pipeline")
    axes.set_ylabel("peak memory of a GPU (GB)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(min(places) - _WIDEST, max(places) + _WIDEST)
    axes.set_title(title, fontsize=10, wrap=True)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    bare(axes)
    return save(figure)


def front_png(points: Sequence[Any], limit_bytes: float, title: str) -> bytes:
    """The time of the fastest layout for every amount of memory."""
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = new_figure()
    axes = figure.add_subplot()
    ascending = sorted(points, key=lambda one: one.peak_bytes)
    memory = [one.peak_bytes / 1e9 for one in ascending]
    seconds = [one.seconds for one in ascending]
    axes.step(
        memory, seconds, "o-", where="post", color=CATEGORIES[0], ms=4, label="fastest layout"
    )
    shown = ascending[:: max(1, len(ascending) // 8)]
    for one in shown:
        axes.annotate(
            one.layout,
            (one.peak_bytes / 1e9, one.seconds),
            (4, 5),
            textcoords="offset points",
            fontsize=6,
            rotation=35,
        )
    axes.axvline(limit_bytes / 1e9, **_limit(limit_bytes))
    axes.set_title(title, fontsize=10, wrap=True)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 1.15 * max(seconds, default=1.0))
    axes.set_xlabel("peak memory of a GPU (GB)")
    axes.set_ylabel("seconds per iteration")
    axes.legend(frameon=False, fontsize=8)
    bare(axes)
    return save(figure)


def frontier_png(
    points: Sequence[Any], cost: str, title: str, deadline_days: float | None = None
) -> bytes:
    """Days over cost, with the Pareto front of each length joined, the bounds and the deadline."""
    figure = new_figure(9.0)
    axes = figure.add_subplot()
    shown = [(one, one.days) for one in points if one.days is not None]
    lengths = sorted({one.sequence for one, _ in shown})
    for sequence in lengths:
        front = sorted(
            (one.cost, days) for one, days in shown if one.is_pareto and one.sequence == sequence
        )
        axes.plot(
            [cost for cost, _ in front], [days for _, days in front], "-", color=CATEGORIES[0]
        )
    axes.plot([one.cost for one, _ in shown], [days for _, days in shown], "o", ms=6,
              color=CATEGORIES[0], label="best layout; on the Pareto front if joined")  # fmt: skip
    bounds = [(one.cost, one.bound_days) for one, _ in shown if one.bound_days is not None]
    axes.plot([cost for cost, _ in bounds], [days for _, days in bounds], "_", color="0.4", ms=12,
              label="bound at this cost")  # fmt: skip
    counts = {one.gpus for one, _ in shown}
    for one, days in shown:
        parts = [f"{one.gpus} GPUs"] if len(counts) > 1 or len(lengths) == 1 else []
        parts += [f"{one.sequence:,} tokens"] if len(lengths) > 1 else []
        place = (one.cost, days)
        axes.annotate(", ".join(parts), place, (6, 5), textcoords="offset points", fontsize=8)
    if deadline_days is not None:
        label = f"deadline, {deadline_days:g} days"
        axes.axhline(deadline_days, color=CRITICAL_COLOUR, lw=1.5, ls="--", label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda days, _: f"{days:g}" if f"{days:e}"[0] in "235" else "")
    axes.margins(x=0.12)
    axes.set_xlabel(cost)
    axes.set_ylabel("days")
    axes.set_title(title, fontsize=10, wrap=True)
    axes.legend(frameon=False, fontsize=8)
    bare(axes)
    return save(figure)


def stages_png(stages: Sequence[Any], title: str) -> bytes:
    """Above a microbatch's forward and backward on each stage; below memory and its limit."""
    figure = new_figure(height=6.5)
    above, below = figure.subplots(2, 1, sharex=True)
    kinds = list(dict.fromkeys(one.device_kind for one in stages))
    colour = {kind: CATEGORIES[i % len(CATEGORIES)] for i, kind in enumerate(kinds)}
    _draw_times(above, stages, colour)
    _draw_memory(below, stages, colour)
    above.set_title(title, fontsize=10, wrap=True)
    bare(above)
    bare(below)
    return save(figure)


def _draw_times(axes: "Axes", stages: Sequence[Any], colour: dict[str, str]) -> None:
    for kind, shade in colour.items():
        own = [(s, one) for s, one in enumerate(stages) if one.device_kind == kind]
        places = [s for s, _ in own]
        forward = [1e3 * one.forward_seconds for _, one in own]
        backward = [1e3 * one.backward_seconds for _, one in own]
        axes.bar(places, forward, color=shade, alpha=0.55, label=f"{kind}: forward")
        axes.bar(places, backward, bottom=forward, color=shade, label=f"{kind}: backward")
    axes.set_ylabel("a microbatch (ms)")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_memory(axes: "Axes", stages: Sequence[Any], colour: dict[str, str]) -> None:
    places = list(range(len(stages)))
    shades = [colour[one.device_kind] for one in stages]
    axes.bar(places, [one.memory_bytes / 1e9 for one in stages], color=shades)
    for s, one in enumerate(stages):
        limit = one.capacity_bytes / 1e9
        label = "a GPU has" if s == 0 else None
        axes.plot([s - 0.45, s + 0.45], [limit, limit], "--", color=CRITICAL_COLOUR, label=label)
    axes.set_ylabel("peak memory of a GPU (GB)")
    axes.set_xticks(
        places,
        [f"{one.first}-{one.stop - 1}\n{one.replicas} x t{one.tensor}" for one in stages],
        fontsize=7,
    )
    axes.set_xlabel("layers of the stage; replicas x tensor degree")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


SHOWN = 20
"""Layouts that may still win."""


def trials_png(tried: Sequence[Any], open_: Sequence[Any]) -> bytes:
    """A PNG of the trials in their order, and right of them of layouts that may still win."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure()
    axes = figure.add_subplot()
    places = range(1, len(tried) + 1)
    known = [(i, one.seconds) for i, one in zip(places, tried, strict=True) if one.seconds]
    before = [
        (i, one.predicted_seconds)
        for i, one in zip(places, tried, strict=True)
        if one.predicted_seconds
    ]
    failed = [
        (i, one.predicted_seconds) for i, one in zip(places, tried, strict=True) if not one.seconds
    ]
    if before:
        axes.plot(*zip(*before, strict=True), "_", color=CATEGORIES[1], ms=12, label="predicted")
    if known:
        axes.plot(*zip(*known, strict=True), "o", color=CATEGORIES[0], ms=5, label="measured")
        best = list(accumulate((one.seconds or inf for one in tried), min))
        axes.step(
            [*places, len(tried) + 1 + min(len(open_), SHOWN)], [*best, best[-1]], where="post",
            color=CATEGORIES[0], lw=1, label="the best so far",
        )  # fmt: skip
    for place, predicted in failed:
        label = "out of memory, or crashed"
        if predicted is None:
            axes.axvline(place, color=CRITICAL_COLOUR, lw=0.8, ls=":", label=label)
        else:
            axes.plot(place, predicted, "x", color=CRITICAL_COLOUR, ms=6, label=label)
    for place, one in enumerate(open_[:SHOWN], len(tried) + 1):
        axes.plot([place] * 2, [one.seconds_low, one.seconds_high], color="#999999", lw=3)
        axes.plot(place, one.seconds, "o", color="#555555", ms=4)
    if open_:
        axes.plot([], [], color="#999999", lw=3, label="may still win: 9 of 10 within")
    axes.set_xlabel("trial" if not open_ else "trial, and layouts that were not tried")
    axes.set_ylabel("seconds of an iteration")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys(), frameon=False)
    bare(axes, "both")
    return save(figure)


_ROW_INCHES = 0.26


def rates_png(sets: Sequence[Any]) -> bytes:
    """Under each set's name a bar of every model's mean error to both sides, and a dot at the bias.

    A user's own set has runs in place of models; the number of runs is in brackets.

    Behind a set's bars are its ranges: what it predicts of a run is that far off at the most.
    """
    from matplotlib.ticker import PercentFormatter

    rows = sum(1 + len(one.errors) for one in sets)
    figure = new_figure(9.0, min(MAX_HEIGHT_INCHES, 1.4 + _ROW_INCHES * rows))
    axes = figure.add_subplot()
    axes.use_sticky_edges = False  # the leftmost bar ends within the axes
    ticks: list[str] = []
    heads = []
    for one in sets:
        heads.append(len(ticks))
        _draw_set(axes, one, len(ticks))
        ticks += [
            one.name,
            *(f"{error.model} ({counted(error.runs, 'run', 'runs')})" for error in one.errors),
        ]
    axes.set_yticks(range(rows), ticks, fontsize=7)
    for place in heads:
        axes.get_yticklabels()[place].set_fontweight("bold")
    axes.axvline(0, color="#888888", lw=0.8)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("predicted over measured seconds, less one, of what was left out of the fit")
    bare_rows(axes, rows)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save(figure)


def _draw_set(axes: "Axes", one: Any, first: int) -> None:
    """Draw a set whose name is in row ``first``; each kind of its parts is once in the legend."""
    labels = ["range without experts", "range with experts", "mean absolute error", "mean error"]
    known = axes.get_legend_handles_labels()[1]
    labels = ["_" * (label in known) + label for label in labels]
    rows = len(one.errors)
    styles: tuple[dict[str, Any], ...] = (
        {"color": "#dde7f7"},
        {"color": "none", "edgecolor": "#888888", "ls": ":"},
    )
    for spread, style, label in zip((one.dense, one.experts), styles, labels, strict=False):
        low, high = 1 / spread.high - 1, 1 / spread.low - 1
        axes.barh(first + rows / 2, high - low, rows + 0.9, low, label=label, **style)
    if not rows:
        return
    places = [first + row for row in range(1, 1 + rows)]
    errors = [error.error for error in one.errors]
    axes.barh(
        places, [2 * error for error in errors], 0.45, [-error for error in errors],
        color=CATEGORIES[0], alpha=0.55, label=labels[2],
    )  # fmt: skip
    biases = [error.bias for error in one.errors]
    axes.plot(biases, places, "o", color=CRITICAL_COLOUR, ms=4, label=labels[3])
