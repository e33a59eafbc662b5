"""Samples per second of a sweep as a PNG: a line for every combination of the other sizes."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.executor.drawing.charts.chart import DOTS_PER_INCH, save
from stagewright.executor.drawing.colours import CATEGORIES

WIDTH_INCHES, HEIGHT_INCHES = 10.0, 5.5
_MARKERS = "osD^vP*X"  # lines are told apart without their colours too


@dataclass(frozen=True, slots=True)
class SweepLine:
    """Samples per second at each place of the horizontal axis; None without a plan."""

    name: str
    rates: tuple[float | None, ...]


def sweep_png(axis: str, places: Sequence[str], lines: Sequence[SweepLine]) -> bytes:
    """A PNG; ``axis`` names the size whose values are ``places``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((WIDTH_INCHES, HEIGHT_INCHES), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, line in enumerate(lines):
        rates = [float("nan") if rate is None else rate for rate in line.rates]
        marker = _MARKERS[number % len(_MARKERS)]
        colour = CATEGORIES[number % len(CATEGORIES)]
        axes.plot(range(len(places)), rates, f"{marker}-", color=colour, label=line.name, ms=5)
    axes.set_xticks(range(len(places)), places)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(axis)
    axes.set_ylabel("samples per second")
    if len(lines) > 1 or lines[0].name:
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.grid(color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return save(figure)
