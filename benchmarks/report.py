"""Tables of results: printed as markdown, and kept as data in ``results/``."""

import csv
import datetime
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from os import cpu_count
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
PAGES = Path(__file__).parents[1] / "docs" / "benchmarks"
FIGURES = PAGES / "figures"
PACKAGES = ("ortools", "highspy", "numpy", "numba", "torch")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title; ``name`` is that of its file of results."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]

    def __str__(self) -> str:
        lines = [f"**{self.title}**", "", _row(self.columns), _row(["---"] * len(self.columns))]
        return "\n".join([*lines, *(_row(_shown(cell) for cell in row) for row in self.rows)])


def machine() -> str:
    """The machine, the day and the versions of a run, in one line."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search(r"model name\s*: (.*)", text)
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (
        f"{model[1] if model else platform.processor()}, {cpu_count()} cores; "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}; Python {platform.python_version()}, "
        f"{packages}"
    )


def write(table: Table, folder: Path = RESULTS) -> None:
    """Write a table as CSV; two comments, its title and the line of its run, come first."""
    with (folder / f"{table.name}.csv").open("w", encoding="utf-8") as file:
        file.write(f"# {table.title}\n# {machine()}\n")
        rows = (map(_shown, row) for row in table.rows)
        csv.writer(file, lineterminator="\n").writerows([table.columns, *rows])


def percent(value: float | None) -> str:
    """A share of one as a percentage; empty where there is none."""
    return "" if value is None else f"{value:.1%}"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(cell: object) -> str:
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
