"""Memory by rank, the fastest layouts by memory, and trainings by the number of GPUs, as PNG."""

from collections.abc import Sequence
from typing import Any, Protocol

from stagewright.executor.drawing.charts.figures import bare, new_figure, save
from stagewright.executor.drawing.colours import CATEGORIES, CRITICAL_COLOUR, MEMORY_COLOURS

WIDTH_INCHES, HEIGHT_INCHES = 10.0, 5.5
_WIDEST = 0.75  # positions left and right of the bars: the one of a single position is not a wall


class Memory(Protocol):
    """Bytes of the ranks at a position in the pipeline: a field ``KIND_bytes`` for every kind."""

    @property
    def rank(self) -> int:
        """The rank's position in the pipeline."""


class FrontierPoint(Protocol):
    """The fastest layout of a peak."""

    @property
    def peak_bytes(self) -> float:
        """The rank's peak memory in bytes."""

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""

    @property
    def layout(self) -> str:
        """The layout's text."""


def _limit(limit_bytes: float) -> dict[str, Any]:
    """The style and the label of the line at a device's memory."""
    label = f"a device has {limit_bytes / 1e9:g} GB"
    return {"color": CRITICAL_COLOUR, "lw": 1.5, "ls": "--", "label": label}


def memory_png(ranks: Sequence[Memory], limit_bytes: float, title: str) -> bytes:
    """Bars of every rank's memory by kind (GB), and a line at the memory of a device."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(WIDTH_INCHES, HEIGHT_INCHES)
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


def front_png(points: Sequence[FrontierPoint], limit_bytes: float, title: str) -> bytes:
    """The time of the fastest layout for every amount of memory."""
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = new_figure(WIDTH_INCHES, HEIGHT_INCHES)
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


_COLOUR = CATEGORIES[0]


class Point(Protocol):
    """The best layout for a number of GPUs and a length of sequences."""

    @property
    def gpus(self) -> int:
        """The number of GPUs."""

    @property
    def sequence(self) -> int:
        """Tokens of a sample."""

    @property
    def days(self) -> float | None:
        """Days of the training; None without a layout."""

    @property
    def bound_days(self) -> float | None:
        """No layout takes fewer."""

    @property
    def cost(self) -> float:
        """Dollars or GPU-hours."""

    @property
    def is_pareto(self) -> bool:
        """Whether no other point is better in time or cost, and no worse in the other."""


def frontier_png(
    points: Sequence[Point], cost: str, title: str, deadline_days: float | None = None
) -> bytes:
    """Days over cost, with the Pareto front of each length joined, the bounds and the deadline."""
    figure = new_figure(9.0, 5.5)
    axes = figure.add_subplot()
    shown = [(one, one.days) for one in points if one.days is not None]
    lengths = sorted({one.sequence for one, _ in shown})
    for sequence in lengths:
        front = sorted(
            (one.cost, days) for one, days in shown if one.is_pareto and one.sequence == sequence
        )
        axes.plot([cost for cost, _ in front], [days for _, days in front], "-", color=_COLOUR)
    axes.plot([one.cost for one, _ in shown], [days for _, days in shown], "o", color=_COLOUR, ms=6,
              label="best layout; on the Pareto front if joined")  # fmt: skip
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
