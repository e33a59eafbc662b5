"""Rows of named things in time, as jobs on machines: a colour for each name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stagewright.executor.drawing.colours import CATEGORIES, mixed
from stagewright.executor.drawing.lanes import Bar, Drawing, Kind, Lane, Mark

MOST_NAMED = 24  # in a legend
_LIGHTER = 0.35  # share of white in colours of dark pages, on which some would be too dark


@dataclass(frozen=True, slots=True)
class Run:
    """A bar of category ``of`` from ``start`` to ``end``; ``name`` is its own text."""

    of: str
    start: float
    end: float
    name: str = ""


def runs_drawing(
    rows: Iterable[tuple[str, Sequence[Run]]],
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


def _kind(name: str, number: int) -> Kind:
    colour = CATEGORIES[number % len(CATEGORIES)]
    shown = name if number < MOST_NAMED else "and others"
    return Kind(shown, colour, mixed(colour, "#ffffff", _LIGHTER))


def _bar(run: Run) -> Bar:
    name = run.name or run.of
    return Bar(name, run.of, run.start, run.end, label=name, detail=run.of if run.name else "")
