"""Shared by the commands: options, tables, JSON, progress."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from stagewright.cli.options import Printed, Written
from stagewright.graphs.documents.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from stagewright.formulations.forms.answers import OnProgress, Progress, StopToken
    from stagewright.formulations.plans.plan_class import PlanClass
    from stagewright.service.answers import Answer
    from stagewright.service.pipelines.answers import ViolationAnswer
    from stagewright.service.requests import Request

R = TypeVar("R", bound="Request")


BEGAN = monotonic()  # the command line is imported when a command begins
_WIDTH_WITHOUT_TERMINAL = 120


def out() -> "Console":
    """The console of stdout."""
    from rich.console import Console

    # No markup: names of models, devices and files may contain brackets.
    console = Console(highlight=False, soft_wrap=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH_WITHOUT_TERMINAL
    return console


def say(*lines: "RenderableType") -> None:
    """Print text and tables to stdout."""
    console = out()
    for line in lines:
        console.print(line, soft_wrap=isinstance(line, str))  # a line of text stays one line


def warn(message: str) -> None:
    """One line on stderr about an answer that rests on an assumption."""
    print(f"stagewright: warning: {message}", file=sys.stderr)


_LONGEST_NAME = 24
"""Characters of a name that a table does not break."""


def print_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", *, tight: bool = False
) -> None:
    """Print a table; a heading that starts with ``<`` marks a left-aligned column of text.

    A ``tight`` one has less space between its columns. Names in a first column of text are whole.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD,
        title=title or None,
        title_justify="left",
        pad_edge=False,
        padding=(0, 1, 0, 0) if tight else (0, 1),
    )
    rows = list(rows)
    for name in head:
        table.add_column(
            name.lstrip("<"), justify="left" if name[:1] == "<" else "right", overflow="fold"
        )
    names = [row[0] for row in rows] if head[0][:1] == "<" else []
    table.columns[0].no_wrap = 0 < max(map(len, names), default=0) <= _LONGEST_NAME
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out().print(table)


def print_answer(answer: "Answer") -> None:
    """Print ``answer`` as one JSON object."""
    print_json(answer.json_object())


def print_json(document: dict[str, Any]) -> None:
    """Print ``document`` as one JSON object; numbers that are not finite become null."""
    sys.stdout.write(json.dumps(_finite(document), indent=1, allow_nan=False) + "\n")


def terminal() -> "Console | None":
    """The console of stderr; None if that is not a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    return console if console.is_terminal else None


@contextmanager
def progress(task: str, stop: "StopToken | None" = None) -> Iterator["OnProgress"]:
    """Show ``task`` and its progress on stderr while the body runs, if that is a terminal."""
    from stagewright.formulations.forms.answers import silent

    console = terminal()
    if console is None:
        yield silent
        return
    line = ProgressLine(task, stop)
    spinner = "dots" if console.encoding.startswith("utf") else "line"
    with console.status(line, spinner=spinner):
        yield line.take


@dataclass
class ProgressLine:
    """Task, elapsed time, best answer, best bound and gap; redrawn regularly.

    The time is updated even if nothing is reported.
    """

    task: str
    stop: "StopToken | None" = None
    best: float = math.inf
    bound: float = -math.inf
    plans: "PlanClass | None" = None
    reported: bool = False
    doing: str = ""

    def take(self, news: "Progress") -> None:
        """Keep a better answer or bound, or what is done."""
        self.doing = news.doing
        if news.doing:
            return
        self.reported = True
        self.best = self.best if news.objective is None else min(self.best, news.objective)
        # A bound on another class of plans replaces the previous one.
        self.bound = max(self.bound, news.bound) if news.plans == self.plans else news.bound
        self.plans = news.plans

    def __rich__(self) -> "Text":
        from rich.text import Text

        told = f"{self.task}: {monotonic() - BEGAN:.0f} s"
        if self.reported:
            bound = min(self.bound, self.best)
            best, gap = "none yet", ""
            if self.best < math.inf:
                best, gap = f"{self.best:.6g}", f", gap {percent(_gap(self.best, bound))}"
            told += f", best {best}, bound {bound:.6g}{gap}"
        if self.doing:
            told += f", {self.doing}"
        if self.stop is not None and self.stop.is_set():
            told += "; stopping, a second Ctrl-C ends it immediately"
        return Text(told)


def _gap(best: float, bound: float) -> float:
    return (best - bound) / best if best > 0 else 0.0


def percent(share: float | None) -> str:
    """A fraction as a percentage; a dash if there is none."""
    return "-" if share is None or not math.isfinite(share) else f"{share:.2%}"


def seconds(value: float | None) -> str:
    """A time with its unit; a dash if there is none."""
    return "-" if value is None else format_seconds(value)


def size(value: float | None) -> str:
    """A number of bytes with its unit; a dash if there is none."""
    return "-" if value is None else format_bytes(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


A = TypeVar("A", bound="Answer")
D = TypeVar("D")


def kept(document: D | None, given: Written, save: Callable[[D, Path], None]) -> list[Path]:
    """The file of a document that is there and was asked for, once it is saved."""
    if document is None or given.output is None:
        return []
    save(document, given.output)
    return [given.output]


def tell(
    answer: A,
    given: Printed,
    show: Callable[[A], object],
    files: Iterable[Path | None] = (),
    *,
    listed: bool = False,
) -> None:
    """Print an answer, and the files that were written, which JSON has if they are ``listed``."""
    written = [str(file) for file in files if file is not None]
    if given.as_json:
        print_json(answer.json_object() | ({"files": written} if listed else {}))
        return
    show(answer)
    say(*(f"{file} is written" for file in written))


def tell_drawn(
    answer: "Answer",
    given: Printed,
    asked: "Iterable[tuple[Path | None, Callable[[], str | bytes]]]",
    show: Callable[[], object],
) -> None:
    """Write the drawings that are asked for and print their names; else print an answer."""
    from stagewright.graphs.documents.documents import write_file

    wanted = [(path, draw) for path, draw in asked if path is not None]
    with progress("drawing"):
        for path, draw in wanted:
            write_file(path, draw())
    files = [path for path, _ in wanted]
    tell(answer, given, lambda _: None if files else show(), files, listed=True)


def tell_invalid(plan: Path, error: Exception, given: Printed) -> int:
    """Print why a plan cannot run; the exit code."""
    from stagewright.service.answers import InvalidAnswer

    answer = InvalidAnswer(reason=str(error))
    tell(answer, given, lambda _: say(f"{plan} cannot run: {error}"))
    return 1


def print_violations(plan: Path, violations: "Sequence[ViolationAnswer]") -> None:
    """Print the rules that a plan breaks."""
    rows = [(one.rule, one.place, one.message) for one in violations]
    rules = f"{len(rows)} broken rule{'s' if len(rows) > 1 else ''}"
    print_table(("<rule", "<place", "<what was found"), rows, f"{plan}: {rules}")
