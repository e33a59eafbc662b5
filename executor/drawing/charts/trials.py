"""Trials of a tuning: the seconds of each, the best so far, and what may still win, as PNG."""

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import Protocol

from stagewright.executor.drawing.charts.figures import bare, new_figure, save
from stagewright.executor.drawing.colours import CATEGORIES, CRITICAL_COLOUR

WIDTH_INCHES, HEIGHT_INCHES = 10.0, 5.5
SHOWN = 20
"""Layouts that may still win."""


class Tried(Protocol):
    """A trial."""

    @property
    def seconds(self) -> float | None:
        """Measured; None if it has failed."""

    @property
    def predicted_seconds(self) -> float | None:
        """Before any trial."""


class MayWin(Protocol):
    """A layout that was not tried."""

    @property
    def seconds(self) -> float:
        """As corrected by the trials."""

    @property
    def seconds_low(self) -> float:
        """The least of the range of 9 of 10."""

    @property
    def seconds_high(self) -> float:
        """The most of it."""


def trials_png(tried: Sequence[Tried], open_: Sequence[MayWin]) -> bytes:
    """A PNG of the trials in their order, and right of them of layouts that may still win."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(WIDTH_INCHES, HEIGHT_INCHES)
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
