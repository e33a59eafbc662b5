"""The pictures of ``gavel.py``: ours solid, published points dashed in the same colour."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import FIGURES
from stagewright.graphs.documents.arrays import Floats

DOTS_PER_INCH = 80
TALLEST = 2.5  # times our highest point: published lines beyond it leave the picture

Points = Mapping[float, float]
Curves = Mapping[str, tuple[Points, Points]]
"""By label: our values by place, and the published ones."""


def by_load(
    name: str, title: str, curves: Curves, samples: Mapping[str, Sequence[float]], metric: str
) -> None:
    """Average completion time by input rate, beside the distribution at the highest rate."""
    picture = _figure(13, 4.5)
    left, right = picture.subplots(1, 2)
    _rates(left, curves, title)
    for number, (label, values) in enumerate(samples.items()):
        _distribution(right, values, _colour(number), "-", label)
    rate = max(rate for ours, _ in curves.values() for rate in ours)
    right.set(xlabel=metric, ylabel="part of the jobs", ylim=(0, 1), title=f"{rate:g} jobs/h")
    right.set_xscale("log")
    right.legend(fontsize=8)
    _save(picture, name)


def two_loads(name: str, panels: Mapping[str, Curves]) -> None:
    """Average completion time by input rate, a panel for each title."""
    picture = _figure(13, 4.5)
    for (title, curves), panel in zip(
        panels.items(), picture.subplots(1, len(panels)), strict=True
    ):
        _rates(panel, curves, title)
    _save(picture, name)


def _rates(panel: Axes, curves: Curves, title: str) -> None:
    _curves(panel, curves)
    top = max(value for ours, _ in curves.values() for value in ours.values())
    panel.set_ylim(0, TALLEST * top)
    panel.set(xlabel="jobs per hour", ylabel="average JCT, hours", title=title)


def makespans(curves: Curves) -> None:
    """Makespan by number of jobs."""
    picture = _figure(7, 4.5)
    panel = picture.subplots()
    _curves(panel, curves)
    panel.set_yscale("log")
    panel.set(xlabel="jobs", ylabel="makespan, hours", title="Static trace, multi-GPU jobs")
    _save(picture, "gavel-makespan")


def _curves(panel: Axes, curves: Curves) -> None:
    for number, (label, (ours, published)) in enumerate(curves.items()):
        panel.plot(list(ours), list(ours.values()), color=_colour(number), marker="o", label=label)
        places = sorted(published)
        panel.plot(
            places, [published[place] for place in places], color=_colour(number), ls="--", lw=1
        )
    panel.plot([], [], color="grey", ls="--", lw=1, label="published")
    panel.legend(fontsize=8)


def priorities(title: str, samples: Mapping[str, Mapping[float, Sequence[float]]]) -> None:
    """Distributions of completion times by policy and weight."""
    picture = _figure(7, 4.5)
    panel = picture.subplots()
    for number, (label, by_weight) in enumerate(samples.items()):
        for (weight, hours), style in zip(by_weight.items(), ("-", ":"), strict=True):
            _distribution(panel, hours, _colour(number), style, f"{label}, weight {weight:g}")
    panel.set(xlabel="job completion time, hours", ylabel="part of the jobs", title=title)
    panel.set_xscale("log")
    panel.legend(fontsize=8)
    _save(picture, "gavel-priorities")


def cost(title: str, found: Mapping[str, tuple[float, float]]) -> None:
    """Dollars and the part of missed SLOs, by policy."""
    picture = _figure(9, 3.5)
    left, right = picture.subplots(1, 2)
    left.bar(list(found), [dollars for dollars, _ in found.values()], color="tab:blue")
    left.set_ylabel("dollars")
    right.bar(list(found), [100 * missed for _, missed in found.values()], color="tab:red")
    right.set_ylabel("SLOs missed, %")
    picture.suptitle(title)
    _save(picture, "gavel-cost")


def hierarchies(
    found: Mapping[str, tuple[Floats, Floats, Floats]], jobs_each: int, every: int
) -> None:
    """Stacked shares of jobs, a colour for each entity, above the total throughputs.

    By discipline: shares, shape (jobs present, jobs); total throughput, and a static partition's.
    """
    picture = _figure(13, 7)
    above, below = picture.subplots(2, len(found), sharex=True, height_ratios=[3, 2])
    for (discipline, (part, ours, partition)), upper, lower in zip(
        found.items(), above, below, strict=True
    ):
        steps = np.arange(0, every * len(part) + 1)
        present = np.minimum(steps // every, len(part) - 1)
        jobs = range(part.shape[1])
        colours = [_colour(job // jobs_each) for job in jobs]
        labels = ["_" if job % jobs_each else f"entity {job // jobs_each}" for job in jobs]
        upper.stackplot(
            steps,
            part[present].T,
            labels=labels,
            colors=colours,
            edgecolor="black",
            lw=0.4,
            step="post",
        )
        upper.legend(fontsize=8, loc="lower left")
        upper.set(ylabel="part of the throughput", title=f"{discipline} inside each entity")
        upper.margins(0)
        lower.plot(steps, ours[present], drawstyle="steps-post", label="hierarchical")
        lower.plot(steps, partition[present], drawstyle="steps-post", label="static partition")
        lower.set(xlabel="timestep", ylabel="total throughput")
        lower.set_ylim(bottom=0)
        lower.legend(fontsize=8)
    _save(picture, "gavel-hierarchical")


def rounds(
    title: str,
    by_length: Mapping[float, Sequence[float]],
    seconds: Sequence[float],
    samples: Mapping[float, tuple[Sequence[float], Sequence[float]]],
) -> None:
    """Average completion time by length of a round; distributions in rounds and in the ideal."""
    picture = _figure(13, 4.5)
    left, right = picture.subplots(1, 2)
    for number, (rate, hours) in enumerate(by_length.items()):
        left.plot(seconds, hours, color=_colour(number), marker="o", label=f"{rate:g} jobs/h")
        for values, style, label in zip(
            samples[rate], (":", "-"), ("ideal", "rounds of 360 s"), strict=True
        ):
            _distribution(right, values, _colour(number), style, f"{rate:g} jobs/h, {label}")
    left.set(
        xlabel="length of a round, s",
        ylabel="average JCT, hours",
        title=f"Figure 5.15 (a), {title}",
    )
    left.set_xscale("log")
    left.set_xticks(seconds, [f"{one:g}" for one in seconds])
    left.minorticks_off()
    left.set_ylim(bottom=0)
    right.set(
        xlabel="job completion time, hours",
        ylabel="part of the jobs",
        title=f"Figure 5.15 (b), {title}",
    )
    right.set_xscale("log")
    for panel in (left, right):
        panel.legend(fontsize=8)
    _save(picture, "gavel-figure15")


def _distribution(
    panel: Axes, values: Iterable[float], colour: object, style: str, label: str
) -> None:
    ordered = np.sort(np.array(list(values)))
    part = np.arange(1, len(ordered) + 1) / len(ordered)
    panel.step(ordered, part, where="post", color=colour, ls=style, label=label)


def _colour(number: int) -> tuple[float, ...]:
    return colormaps["tab10"](number)


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")


def _save(picture: Figure, name: str) -> None:
    picture.savefig(FIGURES / f"{name}.png")
