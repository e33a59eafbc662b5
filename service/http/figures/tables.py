"""What the page shows of an answer, as data: numbers, tables, timelines and charts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stagewright.executor.drawing.lanes import Drawing, table
from stagewright.executor.drawing.web.render import Chart
from stagewright.graphs.documents.units import format_bytes, format_seconds
from stagewright.service.answers import AnswerTable

HOUR = 3600.0
Told = dict[str, Any]
"""A JSON object of an answer."""


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """The memory of a rank: kind, percent of the bar and colour of each part; the device's end."""

    name: str
    parts: Sequence[tuple[str, float, str]]
    limit_percent: float
    text: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Main numbers with their labels, then tables, timelines and charts with their titles.

    ``lead`` is a title with sentences that come first, ``lines`` are others, ``memory`` has a bar
    for each rank. The layouts, or jobs, of the table with the title ``explains`` can be explained,
    by the same request with the field ``explain``. ``folder`` is the name of a job's ZIP archive.
    """

    facts: Sequence[tuple[str, str]]
    tables: Sequence[AnswerTable] = ()
    timelines: Sequence[tuple[str, Drawing]] = ()
    charts: Sequence[tuple[str, Chart]] = ()
    lead: Sequence[str] = ()
    lines: Sequence[str] = ()
    memory: Sequence[MemoryBar] = ()
    explains: str = ""
    folder: str = ""

    def table(self) -> Told:
        """What the script reads."""
        return {
            "facts": [(value, what) for value, what in self.facts if value],
            "tables": [one.filled() for one in self.tables if one.rows],
            "timelines": [{"title": title, "timeline": table(it)} for title, it in self.timelines],
            "lead": list(self.lead),
            "lines": list(self.lines),
            "memory": [asdict(one) for one in self.memory],
            "explains": self.explains,
            "folder": self.folder,
            "charts": [{"title": title, "chart": it.table()} for title, it in self.charts],
        }


FORMATS: dict[str, Callable[[Any], str]] = {
    "": str,
    "number": "{:.5g}".format,
    "percent": "{:.2%}".format,
    "seconds": format_seconds,
    "hours": lambda value: f"{value / HOUR:.4g} h",
    "bytes": format_bytes,
    "dollars": "{:.2f} $".format,
}
Columns = Mapping[str, str | Callable[[Told], str]]
"""By heading: the name of a field and its format, such as ``gap percent``, or a function."""


def written(value: Any, form: str = "") -> str:
    """A value in a format; empty where there is none."""
    return "" if value is None else FORMATS[form](value)


def _cell(told: Told, column: str | Callable[[Told], str]) -> str:
    if not isinstance(column, str):
        return column(told)
    name, _, form = column.partition(" ")
    return written(told[name], form)


def facts(told: Told, columns: Columns) -> list[tuple[str, str]]:
    """The main numbers of an answer, by what each is."""
    return [(_cell(told, column), what) for what, column in columns.items()]


def titled(title: str, rows: Sequence[Told], columns: Columns) -> AnswerTable:
    """A table with a row for each object."""
    cells = [[_cell(one, column) for column in columns.values()] for one in rows]
    return AnswerTable(title, tuple(columns), cells)
