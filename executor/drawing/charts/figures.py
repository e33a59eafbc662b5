"""Figures of matplotlib: made without a screen, dressed alike, and saved as PNG."""

import io
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DOTS_PER_INCH = 150
MAX_HEIGHT_INCHES = 30.0


def new_figure(
    width: float = 10.0, height: float = 5.5, dots_per_inch: int = DOTS_PER_INCH
) -> "Figure":
    """An empty figure of so many inches."""
    # Imported here: matplotlib takes a second to load, and only pictures need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), dpi=dots_per_inch, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def stacked_axes(width: float, heights: Sequence[float]) -> "Sequence[Axes]":
    """Axes of one figure, one above the other with one time axis, of heights in inches."""
    figure = new_figure(width, min(MAX_HEIGHT_INCHES, 0.7 + sum(heights)))
    grid: Any = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
    return list(grid[:, 0])


def bare(
    axes: "Axes", grid: Literal["x", "both"] | None = None, sides: Iterable[str] = ("top", "right")
) -> None:
    """Hide lines around the axes, and draw a grid below what they show."""
    if grid is not None:
        axes.grid(axis=grid, color="#dddddd", lw=0.6)
        axes.set_axisbelow(True)
    for side in sides:
        axes.spines[side].set_visible(False)


def bare_rows(axes: "Axes", height: float) -> None:
    """Dress axes with rows of bars in time, the first at the top, ``height`` rows high."""
    axes.set_ylim(height - 0.4, -0.6)
    axes.tick_params(length=0)
    bare(axes, "x", ("top", "right", "left"))


def save(figure: Any) -> bytes:
    """The figure as a PNG."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # Characters that the font lacks are drawn as boxes; the warning is not useful here.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
