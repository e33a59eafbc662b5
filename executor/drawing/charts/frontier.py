"""Time and cost of a training by the number of GPUs, as PNG."""

from collections.abc import Sequence
from typing import Protocol

from stagewright.executor.drawing.charts.figures import bare, new_figure, save
from stagewright.executor.drawing.colours import CATEGORIES, CRITICAL_COLOUR

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
