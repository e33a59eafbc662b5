"""Rows of bars in time, packed for a page."""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagewright.executor.drawing.colours import CATEGORIES, mixed

TICKS = 10_000_000  # of the whole time; times in a page are whole numbers of them


@dataclass(frozen=True, slots=True)
class Bar:
    """An action in time (seconds); ``kind`` is a key of the drawing's kinds.

    ``label`` is what is written on it, ``detail`` what else there is to know.
    """

    name: str
    kind: str
    start: float
    finish: float
    critical: bool = False
    label: str = ""
    detail: str = ""

    @property
    def seconds(self) -> float:
        """Duration of the block."""
        return self.finish - self.start


Gap = tuple[float, float, str]
"""Start and end of an idle interval in seconds, and its cause."""


@dataclass(frozen=True, slots=True)
class Lane:
    """The bars of a device, or of another resource that ``group`` names.

    ``members`` are the devices whose rows these are, ``about`` is what is known of each,
    ``stages`` are those whose colours mark the row.
    """

    name: str
    group: str
    bars: tuple[Bar, ...]
    idle: tuple[Gap, ...] = ()
    members: tuple[str, ...] = ()
    about: str = ""
    bottleneck: bool = False
    stages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BarKind:
    """A kind of bars: its name, and its colours on light and dark pages."""

    name: str
    light: str
    dark: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at ``at`` seconds, across all lanes or a range of them."""

    at: float
    name: str = ""
    lanes: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class TimeBand:
    """A named interval of time."""

    name: str
    start: float
    finish: float
    shaded: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """The contents of a page's timeline; ``scale`` is units of time per second."""

    lanes: tuple[Lane, ...]
    kinds: Mapping[str, BarKind]
    end: float
    unit: str = ""
    scale: float = 1.0
    marks: tuple[Mark, ...] = ()
    bands: tuple[TimeBand, ...] = ()
    causes: Mapping[str, str] | None = None  # short names of causes
    stages: int = 0


def packed(found: Drawing | dict[str, Any]) -> str:
    """The drawing's table, or a table, as JSON, deflated, in base64."""
    shown = table(found) if isinstance(found, Drawing) else found
    text = json.dumps(shown, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def table(drawing: Drawing) -> dict[str, Any]:
    """The data of the page's script: columns of whole numbers, texts listed once."""
    texts: dict[str, int] = {"": 0}
    kinds = {key: i for i, key in enumerate(drawing.kinds)}
    names = drawing.causes or {}
    causes = {key: i for i, key in enumerate(names)}
    grid = TICKS / (drawing.end or 1.0)
    found = {
        "end": drawing.end * drawing.scale or 1.0,
        "ticks": TICKS,
        "unit": drawing.unit,
        "stages": drawing.stages,
        "kinds": [
            {"name": kind.name, "light": kind.light, "dark": kind.dark}
            for kind in drawing.kinds.values()
        ],
        "causes": [{"name": name, "short": short} for name, short in names.items()],
        "marks": [
            {"at": one.at * grid, "name": one.name, "lanes": one.lanes} for one in drawing.marks
        ],
        "bands": [
            {"name": one.name, "from": one.start * grid, "to": one.finish * grid,
             "shaded": one.shaded}
            for one in drawing.bands
        ],
        "lanes": [_columns(lane, kinds, causes, texts, grid) for lane in drawing.lanes],
    }  # fmt: skip
    found["texts"] = list(texts)
    return found


def _columns(
    lane: Lane,
    kinds: Mapping[str, int],
    causes: Mapping[str, int],
    texts: dict[str, int],
    grid: float,
) -> dict[str, Any]:
    starts, lengths = _spans([(bar.start, bar.finish) for bar in lane.bars], grid)
    begins, lasting = _spans([(start, finish) for start, finish, _ in lane.idle], grid)
    why = [causes[cause] for _, _, cause in lane.idle]
    names = [_split(bar.name) for bar in lane.bars]

    def numbered(names: Iterable[str]) -> list[int]:
        return [texts.setdefault(name, len(texts)) for name in names]

    return {
        "name": lane.name,
        "group": lane.group,
        "members": lane.members,
        "about": lane.about,
        "stages": lane.stages,
        "bottleneck": lane.bottleneck,
        "start": starts,
        "length": lengths,
        "kind": [kinds[bar.kind] for bar in lane.bars],
        "stem": numbered(stem for stem, _ in names),
        "number": [number for _, number in names],
        "label": numbered(bar.label for bar in lane.bars),
        "detail": numbered(bar.detail for bar in lane.bars),
        "critical": [int(bar.critical) for bar in lane.bars],
        "idle": list(zip(begins, lasting, why, strict=True)),
    }


def _split(name: str) -> tuple[str, int]:
    """A name split into its text and the number at the end, -1 without a number."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :]
    # Only what is read back as it was.
    return (stem, int(digits)) if digits == str(int(digits or -1)) else (name, -1)


def _spans(spans: Sequence[tuple[float, float]], grid: float) -> tuple[list[int], list[int]]:
    """Starts, each relative to the end of the one before, and lengths, in ticks.

    So most are 0, and those of the same action are equal, which makes them small when deflated.
    """
    lengths = [round((finish - start) * grid) for start, finish in spans]
    gaps, until = list[int](), 0
    for (start, _), length in zip(spans, lengths, strict=True):
        gap = round(start * grid) - until
        gap = 0 if abs(gap) <= 1 else gap  # rounding
        gaps.append(gap)
        until += gap + length
    return gaps, lengths


MOST_NAMED = 24  # in a legend
_LIGHTER = 0.35  # share of white in colours of dark pages, on which some would be too dark


@dataclass(frozen=True, slots=True)
class BarRun:
    """A bar of category ``of`` from ``start`` to ``end``; ``name`` is its own text."""

    of: str
    start: float
    end: float
    name: str = ""


def runs_drawing(
    rows: Iterable[tuple[str, Sequence[BarRun]]],
    names: Iterable[str] = (),
    unit: str = "",
    scale: float = 1.0,
    marks: tuple[Mark, ...] = (),
) -> Drawing:
    """Named rows of runs; times are shown in ``unit``: ``scale`` units make one unit of time.

    ``names`` have the colours of all categories in turn, then those that are missing there: what
    is written on a bar tells apart those of one colour.
    """
    given = list(rows)
    every = dict.fromkeys([*names, *(run.of for _, runs in given for run in runs)])
    kinds = {name: _kind(name, number) for number, name in enumerate(every)}
    lanes = tuple(Lane(name, "device", tuple(map(_bar, runs))) for name, runs in given)
    end = max((run.end for _, runs in given for run in runs), default=1.0)
    return Drawing(lanes, kinds, end, unit, scale, marks)


def _kind(name: str, number: int) -> BarKind:
    colour = CATEGORIES[number % len(CATEGORIES)]
    shown = name if number < MOST_NAMED else "and others"
    return BarKind(shown, colour, mixed(colour, "#ffffff", _LIGHTER))


def _bar(run: BarRun) -> Bar:
    name = run.name or run.of
    return Bar(name, run.of, run.start, run.end, label=name, detail=run.of if run.name else "")
