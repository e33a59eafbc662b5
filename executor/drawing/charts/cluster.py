"""Charts of a simulated or real cluster's rounds: PNG, SVG or PDF, by the file's suffix."""

import io
import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stagewright.executor.clusters.timeline import ClusterTimeline, TimelineRound
from stagewright.executor.drawing.charts.figures import MAX_HEIGHT_INCHES, new_figure
from stagewright.executor.drawing.colours import CATEGORIES, label_colour
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.pool import Pool

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
WIDTH_INCHES = 12.0
ROW_INCHES = 0.18
HOUR = 3600.0
CHARACTER_SHARE = 0.007  # of the width, for one character of a label
_MAX_NUMBERED_ROWS = 96
# Jobs have the colours, then the colours with each hatch.
_HATCHES = (None, "///", "...", "xxx", "---", "|||")
MAX_NAMED_JOBS = len(CATEGORIES) * len(_HATCHES)
_LINES = ("-", "--", ":", "-.")  # of lines, whose colours are those of jobs
_BINS = 240  # time bins of the utilisation


def require_suffix(path: str | os.PathLike[str]) -> None:
    """Refuse a file whose name does not end in one of ``SUFFIXES``."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise InputError(f"{path}: the suffix of a picture must be one of {', '.join(SUFFIXES)}")


def draw_rounds(timeline: ClusterTimeline, path: str | os.PathLike[str]) -> None:
    """Draw the assignments: a row per accelerator, a colour per job, pairs with both colours.

    Raises InputError if the timeline has no assignments, or the suffix is not one of ``SUFFIXES``.
    """
    first_row = _first_rows(timeline.pool)
    rows = sum(accelerator.count for accelerator in timeline.pool.accelerators)
    found = spans(timeline)
    if not found:
        raise InputError("the timeline has no assignments: simulate with keep_assignments=True")
    named = min(24, len({job for span in found for job in span[3]}))
    height = min(MAX_HEIGHT_INCHES, max(1.5 + ROW_INCHES * rows, 1.0 + 0.15 * named))
    figure, axes = _figure(path, height)
    _draw_spans(axes, found)
    axes.set(xlabel="hours", ylim=(rows - 0.5, -0.5), yticks=[], title="Rounds by accelerator")
    _name_rows(axes, timeline.pool, first_row, rows)
    axes.set_xlim(found[0][1] / HOUR, max(span[2] for span in found) / HOUR)
    _name_jobs(axes, timeline, sorted({job for span in found for job in span[3]}))
    _write(figure, path)


Span = tuple[int, float, float, tuple[int, ...]]
"""Row of an accelerator, start and end in seconds, and the numbers of the jobs on it."""


def spans(timeline: ClusterTimeline) -> list[Span]:
    """All assignments, rows in the order of the pool; consecutive rounds of a job are one."""
    return list(_spans(timeline, _first_rows(timeline.pool)))


def _spans(timeline: ClusterTimeline, first_row: list[int]) -> Iterable[Span]:
    running: dict[int, Span] = {}
    for one in timeline.rounds:
        for row, jobs in _rows(one, timeline.accelerator, first_row):
            before = running.get(row)
            if before is not None and before[2:] == (one.start_seconds, jobs):
                running[row] = (row, before[1], one.end_seconds, jobs)
                continue
            if before is not None:
                yield before
            running[row] = (row, one.start_seconds, one.end_seconds, jobs)
    yield from running.values()


def _rows(
    one: TimelineRound, accelerator: tuple[int, ...], first_row: list[int]
) -> Iterable[tuple[int, tuple[int, ...]]]:
    for assignment in one.assignments:
        for number in assignment.accelerators:
            yield first_row[accelerator[assignment.worker]] + number, assignment.jobs


def _first_rows(pool: Pool) -> list[int]:
    counts = [accelerator.count for accelerator in pool.accelerators]
    return [0, *itertools.accumulate(counts)][:-1]


def _draw_spans(axes: "Axes", spans: Sequence[Span]) -> None:
    """Draw all spans, those of a job at once, with the job's number where it fits."""
    from matplotlib.collections import PolyCollection

    rectangles = defaultdict[int, list[Floats]](list)
    hours = (max(span[2] for span in spans) - spans[0][1]) / HOUR
    for row, start, end, jobs in spans:
        part = 0.9 / len(jobs)
        for place, job in enumerate(jobs):
            bottom, left, right = row - 0.45 + place * part, start / HOUR, end / HOUR
            rectangles[job].append(
                np.array(
                    [(left, bottom), (right, bottom), (right, bottom + part), (left, bottom + part)]
                )
            )
            if right - left >= CHARACTER_SHARE * len(str(job)) * hours:
                _number(axes, (left + right) / 2, bottom + part / 2, job)
    for job, verts in rectangles.items():
        its = looks(job)
        axes.add_collection(
            PolyCollection(verts, edgecolors=its.edge, linewidth=0, hatch=its.hatch,
                           facecolors=its.colour)
        )  # fmt: skip
        axes.add_collection(
            PolyCollection(verts, facecolors="none", edgecolors="white", linewidth=0.4)
        )


def _number(axes: "Axes", x: float, y: float, job: int) -> None:
    its = looks(job)
    box = {"facecolor": its.colour, "edgecolor": "none", "pad": 0.4} if its.hatch else None
    axes.text(x, y, str(job), ha="center", va="center", fontsize=6,
              color=label_colour(its.colour), bbox=box)  # fmt: skip


class Looks(NamedTuple):
    """How a job is filled: its colour, and a hatch (None: plain) in the colour ``edge``."""

    colour: str
    hatch: str | None
    edge: str


def looks(job: int) -> Looks:
    """Each of the first ``MAX_NAMED_JOBS`` jobs differs from all others."""
    texture, place = divmod(job % MAX_NAMED_JOBS, len(CATEGORIES))
    colour = CATEGORIES[place]
    return Looks(colour, _HATCHES[texture], label_colour(colour))


def _name_rows(axes: "Axes", pool: Pool, first_row: list[int], rows: int) -> None:
    """The types of accelerators, and the numbers of their rows while they are legible."""
    for name, row in zip(pool.names, first_row, strict=True):
        axes.axhline(row - 0.5, color="black", linewidth=0.8)
        axes.text(-0.025, row, f"{name} ", transform=axes.get_yaxis_transform(), ha="right",
                  va="center", fontsize=9)  # fmt: skip
    if rows <= _MAX_NUMBERED_ROWS:
        numbers = [n for accelerator in pool.accelerators for n in range(accelerator.count)]
        axes.set_yticks(range(rows), [str(n) for n in numbers], fontsize=6)
        axes.tick_params(axis="y", length=0)


def _name_jobs(axes: "Axes", timeline: ClusterTimeline, jobs: list[int]) -> None:
    """Add a legend of the jobs' numbers and names; of too many, say that colours recur."""
    from matplotlib.patches import Patch

    if len(jobs) > MAX_NAMED_JOBS:
        axes.set_title(f"Rounds by accelerator; numbers are jobs, colours of {len(jobs)} recur")
        return
    patches = [
        Patch(facecolor=its.colour, hatch=its.hatch and 2 * its.hatch, edgecolor=its.edge,
              linewidth=0, label=f"{job}  {timeline.jobs[job].job.name}")
        for job in jobs
        for its in [looks(job)]
    ]  # fmt: skip
    axes.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.02),
        title="job",
        fontsize=7,
        frameon=False,
        handlelength=2.4,
        handleheight=1.1,
        ncols=-(-len(jobs) // 24),
    )


def draw_jct_cdf(timeline: ClusterTimeline, name: str, path: str | os.PathLike[str]) -> None:
    """Draw the cumulative distribution of job completion times under the policy ``name``.

    Raises InputError if no job completed, or the suffix is not one of ``SUFFIXES``.
    """
    figure, axes = _figure(path, 5.0)
    hours = np.sort(timeline.durations()) / HOUR
    if not hours.size:
        raise InputError(f"{name}: no job completed, there is no completion time to draw")
    part = np.arange(1, len(hours) + 1) / len(hours)
    axes.step(hours, part, where="post", label=f"{name} (mean {hours.mean():.2f} h)", **_line(0))
    axes.set(
        xlabel="job completion time, hours",
        ylabel="fraction of the jobs",
        ylim=(0, 1),
        title="Completed jobs",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    _write(figure, path)


def draw_utilisation(timeline: ClusterTimeline, path: str | os.PathLike[str]) -> None:
    """Draw busy accelerators of each type and active jobs over time.

    Raises InputError if there was no round, or the suffix is not one of ``SUFFIXES``.
    """
    if not timeline.rounds:
        raise InputError("the timeline has no rounds to draw")
    edges, busy, active = _binned(timeline)
    figure, axes = _figure(path, 5.0)
    middle = (edges[1:] + edges[:-1]) / 2 / HOUR
    counts = np.array([accelerator.count for accelerator in timeline.pool.accelerators])
    for k, (name, part) in enumerate(zip(timeline.pool.names, (busy / counts).T, strict=True)):
        axes.plot(middle, part, label=name, **_line(k))
    axes.set(
        xlabel="hours",
        ylabel="fraction of the accelerators in use",
        ylim=(-0.02, 1.02),
        title="Utilisation by type of accelerator",
    )
    axes.margins(x=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    jobs = axes.twinx()
    jobs.plot(middle, active, color="grey", linewidth=0.8)
    jobs.set_ylabel("active jobs (grey)")
    jobs.set_ylim(bottom=0)
    _write(figure, path)


def _line(number: int) -> "dict[str, Any]":
    """Colour and style of a line."""
    places = len(CATEGORIES)
    return {"color": CATEGORIES[number % places], "linestyle": _LINES[number % len(_LINES)]}


def _binned(timeline: ClusterTimeline) -> tuple[Floats, Floats, Floats]:
    """Edges in seconds, mean busy accelerators (bins, types) and mean active jobs, by time."""
    edges = np.linspace(0.0, timeline.rounds[-1].end_seconds, _BINS + 1)
    times = [0.0]
    areas = [np.zeros(len(timeline.pool.accelerators) + 1)]
    for one in timeline.rounds:
        values = np.array([*one.busy, one.active_jobs])
        if one.start_seconds > times[-1]:
            times.append(one.start_seconds)
            areas.append(areas[-1])
        times.append(one.end_seconds)
        areas.append(areas[-1] + values * (one.end_seconds - one.start_seconds))
    table = np.array(areas)
    at_edges = np.array([np.interp(edges, times, column) for column in table.T]).T
    means = np.diff(at_edges, axis=0) / np.diff(edges)[:, None]
    return edges, means[:, :-1], means[:, -1]


def _figure(path: str | os.PathLike[str], height: float) -> "tuple[Figure, Axes]":
    require_suffix(path)
    figure = new_figure(WIDTH_INCHES, height)
    return figure, figure.add_subplot()


def _write(figure: "Figure", path: str | os.PathLike[str]) -> None:
    suffix = Path(path).suffix.lower()[1:]
    picture = io.BytesIO()
    # Without a date, so that the same timeline gives the same file.
    metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[suffix]
    figure.savefig(picture, format=suffix, metadata=metadata)
    documents.write_file(path, picture.getvalue())
