"""Tables of results: as markdown, and put in their places in the README."""

import datetime
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from os import cpu_count
from pathlib import Path

README = Path(__file__).with_name("README.md")
PACKAGES = ("ortools", "highspy", "numpy", "numba", "torch")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title; ``name`` marks its place in the README."""

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


def write_section(name: str, body: str, path: Path = README) -> None:
    """Put ``body`` between the comments ``<!-- name -->`` and ``<!-- end name -->`` of a file."""
    text = path.read_text()
    opening, closing = f"<!-- {name} -->", f"<!-- end {name} -->"
    head, _, rest = text.partition(opening)
    _, found, tail = rest.partition(closing)
    if not found:
        raise ValueError(f"{path.name} has no place {opening} ... {closing}")
    path.write_text(f"{head}{opening}\n{body}\n{closing}{tail}")


def percent(value: float | None) -> str:
    """A share of one as a percentage; empty where there is none."""
    return "" if value is None else f"{value:.1%}"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(cell: object) -> str:
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
