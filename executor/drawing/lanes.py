"""Rows of bars in time, packed for a page, and the timeline of a plan as such rows."""

import base64
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stagewright.executor.drawing.colours import (
    CATEGORIES,
    DARK_COLOURS,
    KIND_COLOURS,
    KIND_NAMES,
    mixed,
)
from stagewright.executor.drawing.periods import finish_seconds, phases
from stagewright.executor.drawing.timeline import Block, Row, fold, time_unit, timeline
from stagewright.executor.simulation.explanation import PlanExplanation
from stagewright.executor.simulation.idle import IdleCause
from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.units import counted

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


BOUND = "proved lower bound"
CAUSES = {  # what is written on an idle interval, if there is room
    IdleCause.FILL: "fill",
    IdleCause.DRAIN: "drain",
    IdleCause.STAGES: "waits",
    IdleCause.TRANSFERS: "transfer",
    IdleCause.REDUCE: "all-reduce",
    IdleCause.MEMORY: "memory",
    IdleCause.PLAN: "late",
    IdleCause.PERIOD: "idle",
}

Timed = tuple[Action, float, float]
"""An action with its start and end, which all its devices share."""


def critical_actions(found: PlanExplanation | None) -> frozenset[Timed]:
    """The actions of the critical path."""
    steps = () if found is None else found.path
    return frozenset(
        (step.action, step.entry.start_seconds, step.entry.finish_seconds) for step in steps
    )


def timed(block: Block) -> Timed:
    """The key of a block among :func:`critical_actions`."""
    return block.action, block.start_seconds, block.finish_seconds


def is_bottleneck(row: Row, found: PlanExplanation | None) -> bool:
    """Whether it is the row of the busiest resource."""
    if found is None:
        return False
    most = found.bottleneck
    if most.kind == "device":
        return not set(most.devices).isdisjoint(row.devices) and row.about != "sub"
    group = "channel" if most.kind == "channel" else "reduce"
    places = {link_stages(block.action) for block in row.blocks}
    return row.group == group and most.stages in places


def link_stages(action: Action) -> tuple[int, ...]:
    """The stages of a transfer, or of an all-reduce."""
    if action.kind is ActionKind.REDUCE:
        return (action.stage,)
    first = action.stage - (action.kind is ActionKind.SEND_BACKWARD)
    return first, first + 1


def plan_drawing(
    plan: PipelinePlan, found: PlanExplanation | None, rows: Sequence[Row] = ()
) -> Drawing:
    """The timeline of a plan in ``rows``, by default all, with identical devices in one lane."""
    end = finish_seconds(plan)
    unit, scale = time_unit(end)
    rows = rows or fold(timeline(plan, max_device_rows=None))
    critical = critical_actions(found)
    return Drawing(
        lanes=tuple(
            _lane(row, critical, idle, is_bottleneck(row, found))
            for row, idle in zip(rows, idle_of(rows, found), strict=True)
        ),
        kinds=KINDS,
        end=end,
        unit=unit,
        scale=scale,
        marks=tuple(_marks(plan)),
        bands=tuple(_bands(plan)),
        causes={str(cause): short for cause, short in CAUSES.items()},
        stages=len(plan.stages),
    )


KINDS = {
    str(kind): BarKind(KIND_NAMES[kind], KIND_COLOURS[kind], DARK_COLOURS[kind])
    for kind in KIND_COLOURS
}


def idle_of(rows: Sequence[Row], found: PlanExplanation | None) -> list[tuple[Gap, ...]]:
    """The idle intervals of every row; of a periodic plan all between two computations."""
    spans = defaultdict[str, list[Gap]](list)
    for one in () if found is None else found.idle:
        spans[one.device].append((one.start_seconds, one.finish_seconds, str(one.cause)))
    between = _between if found is not None and not found.path else lambda row: ()
    return [
        (*spans[row.devices[0]], *between(row)) if row.devices and row.about != "sub" else ()
        for row in rows
    ]


def _between(row: Row) -> tuple[Gap, ...]:
    return tuple(
        (one.finish_seconds, other.start_seconds, str(IdleCause.PERIOD))
        for one, other in pairwise(row.blocks)
        if one.finish_seconds < other.start_seconds
    )


def _lane(row: Row, critical: frozenset[Timed], idle: tuple[Gap, ...], bottleneck: bool) -> Lane:
    count = len(row.devices)
    name = f"{row.name} · {counted(count, 'device', 'devices')}" if count > 1 else row.name
    return Lane(
        name=name,
        group=row.group,
        bars=tuple(block_bar(block, timed(block) in critical) for block in row.blocks),
        idle=idle,
        members=row.devices,
        about=row.about,
        bottleneck=bottleneck,
        stages=tuple(sorted({block.action.stage for block in row.blocks})) if row.devices else (),
    )


def block_bar(block: Block, critical: bool = False) -> Bar:
    """A block as a bar of its action's kind."""
    return Bar(
        str(block.action),
        str(block.action.kind),
        block.start_seconds,
        block.finish_seconds,
        critical,
        block.label,
        block.detail,
    )


def _marks(plan: PipelinePlan) -> Iterable[Mark]:
    """The bound on an iteration, or the periods' starts."""
    shown = phases(plan)
    if shown is not None:
        yield from (Mark(at) for at in shown.bounds)
    elif plan.certificate is not None:
        yield Mark(plan.certificate.bound_seconds, BOUND)


def _bands(plan: PipelinePlan) -> Iterable[TimeBand]:
    shown = phases(plan)
    for i, (name, begin, end) in enumerate(() if shown is None else shown.headings):
        yield TimeBand(name, begin, end, shaded=i == 0)
