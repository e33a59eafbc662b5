"""Stages of a pipeline on kinds of devices: time of a microbatch and memory, as PNG."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from stagewright.executor.drawing.charts.figures import bare, new_figure, save
from stagewright.executor.drawing.colours import CATEGORIES, CRITICAL_COLOUR

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_INCHES, HEIGHT_INCHES = 10.0, 6.5


class StageBar(Protocol):
    """Layers [first, stop) on replicas of ``tensor`` devices of a kind."""

    @property
    def first(self) -> int:
        """The first layer."""

    @property
    def stop(self) -> int:
        """The layer after the last."""

    @property
    def device_kind(self) -> str:
        """The kind of its devices."""

    @property
    def replicas(self) -> int:
        """The number of tensor groups."""

    @property
    def tensor(self) -> int:
        """Number of devices in a tensor group."""

    @property
    def forward_seconds(self) -> float:
        """Seconds of a microbatch."""

    @property
    def backward_seconds(self) -> float:
        """Seconds of a microbatch."""

    @property
    def memory_bytes(self) -> float:
        """The peak of a device."""

    @property
    def capacity_bytes(self) -> float:
        """Memory of a device in bytes."""


def stages_png(stages: Sequence[StageBar], title: str) -> bytes:
    """Above a microbatch's forward and backward on each stage; below memory and its limit."""
    figure = new_figure(WIDTH_INCHES, HEIGHT_INCHES)
    above, below = figure.subplots(2, 1, sharex=True)
    kinds = list(dict.fromkeys(one.device_kind for one in stages))
    colour = {kind: CATEGORIES[i % len(CATEGORIES)] for i, kind in enumerate(kinds)}
    _draw_times(above, stages, colour)
    _draw_memory(below, stages, colour)
    above.set_title(title, fontsize=10, wrap=True)
    bare(above)
    bare(below)
    return save(figure)


def _draw_times(axes: "Axes", stages: Sequence[StageBar], colour: dict[str, str]) -> None:
    for kind, shade in colour.items():
        own = [(s, one) for s, one in enumerate(stages) if one.device_kind == kind]
        places = [s for s, _ in own]
        forward = [1e3 * one.forward_seconds for _, one in own]
        backward = [1e3 * one.backward_seconds for _, one in own]
        axes.bar(places, forward, color=shade, alpha=0.55, label=f"{kind}: forward")
        axes.bar(places, backward, bottom=forward, color=shade, label=f"{kind}: backward")
    axes.set_ylabel("a microbatch (ms)")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_memory(axes: "Axes", stages: Sequence[StageBar], colour: dict[str, str]) -> None:
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
