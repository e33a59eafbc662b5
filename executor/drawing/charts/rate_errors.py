"""Errors of rate sets, by the model that was left out of the fit, as PNG."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from stagewright.executor.drawing.charts.figures import (
    MAX_HEIGHT_INCHES,
    bare_rows,
    new_figure,
    save,
)
from stagewright.executor.drawing.colours import CATEGORIES, CRITICAL_COLOUR
from stagewright.graphs.documents.units import counted
from stagewright.graphs.machines.rates import LeftOut, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_INCHES, ROW_INCHES = 9.0, 0.26


class ErrorsOfSet(Protocol):
    """A rate set with the errors of the models that were left out."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def dense(self) -> Spread:
        """The range of models without experts."""

    @property
    def experts(self) -> Spread:
        """The range of models with experts."""

    @property
    def errors(self) -> Sequence[LeftOut]:
        """Errors by model."""


def rates_png(sets: Sequence[ErrorsOfSet]) -> bytes:
    """Under each set's name a bar of every model's mean error to both sides, and a dot at the bias.

    A user's own set has runs in place of models; the number of runs is in brackets.

    Behind a set's bars are its ranges: what it predicts of a run is that far off at the most.
    """
    from matplotlib.ticker import PercentFormatter

    rows = sum(1 + len(one.errors) for one in sets)
    figure = new_figure(WIDTH_INCHES, min(MAX_HEIGHT_INCHES, 1.4 + ROW_INCHES * rows))
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


def _draw_set(axes: "Axes", one: ErrorsOfSet, first: int) -> None:
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
