"""Shared by the commands: options, tables, JSON, progress."""

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from stagewright.formulations.forms.answers import OnProgress, Progress, StopToken
    from stagewright.formulations.plans.plan_class import PlanClass
    from stagewright.service.answers import Answer
    from stagewright.service.requests import Request

R = TypeVar("R", bound="Request")


BEGAN = monotonic()  # the command line is imported when a command begins
WIDTH_WITHOUT_TERMINAL = 120


def out() -> "Console":
    """The console of stdout."""
    from rich.console import Console

    # No markup: names of models, devices and files may contain brackets.
    console = Console(highlight=False, soft_wrap=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH_WITHOUT_TERMINAL
    return console


def print_lines(*lines: "RenderableType") -> None:
    """Print text and tables to stdout."""
    console = out()
    for line in lines:
        console.print(line, soft_wrap=isinstance(line, str))  # a line of text stays one line


def warn(message: str) -> None:
    """One line on stderr about an answer that rests on an assumption."""
    print(f"stagewright: warning: {message}", file=sys.stderr)


def print_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", *, tight: bool = False
) -> None:
    """Print a table; a heading that starts with ``<`` marks a left-aligned column of text.

    A ``tight`` one has less space between its columns.
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
    for name in head:
        table.add_column(
            name.lstrip("<"), justify="left" if name[:1] == "<" else "right", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out().print(table)


def print_answer(answer: "Answer") -> None:
    """Print ``answer`` as one JSON object."""
    print_json(answer.json_object())


def print_json(document: dict[str, Any]) -> None:
    """Print ``document`` as one JSON object; numbers that are not finite become null."""
    sys.stdout.write(json.dumps(_finite(document), indent=1, allow_nan=False) + "\n")


@contextmanager
def progress(task: str, stop: "StopToken | None" = None) -> Iterator["OnProgress"]:
    """Show ``task`` and its progress on stderr while the body runs, if that is a terminal."""
    from rich.console import Console

    from stagewright.formulations.forms.answers import silent

    console = Console(stderr=True)
    if not console.is_terminal:
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

    def take(self, news: "Progress") -> None:
        """Keep a better answer or bound."""
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
        if self.stop is not None and self.stop.is_set():
            told += "; stopping, a second Ctrl-C ends it immediately"
        return Text(told)


def _gap(best: float, bound: float) -> float:
    return (best - bound) / best if best > 0 else 0.0


def spelled(name: str) -> str:
    """The option of an argument's name."""
    return f"--{name.replace('_', '-')}"


def read_sizes(text: str) -> list[int]:
    """Sizes of microbatches, ascending."""
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        raise InputError(f"--microbatch-sizes {text!r}: write for example 1,2,4") from None
    if sizes[0] < 1:
        raise InputError(f"--microbatch-sizes must be at least 1, got {sizes[0]}")
    return sizes


def ask(kind: type[R], options: Mapping[str, str] | None = None, /, **fields: Any) -> R:
    """The request of ``fields``; errors that begin with a field name its option instead.

    ``options`` has the options whose name differs from the field.
    """
    try:
        return kind.of(**fields)
    except InputError as error:
        raise InputError(with_option(str(error), fields, options or {})) from None


def with_option(message: str, fields: Iterable[str], options: Mapping[str, str]) -> str:
    """``message`` with an option in place of the field that it begins with, if it does.

    An entry ``field[3]`` is "OPTION of stage 3" if ``options`` have "OPTION of stage" for
    ``field[]``.
    """
    first, _, rest = message.partition(" ")
    name, *_ = re.split(r"[\[:]", first)
    if name not in fields and name not in options:
        return message
    place = re.fullmatch(r"\w+\[(\d+)\]", first)
    if place and f"{name}[]" in options:
        return f"{options[f'{name}[]']} {place[1]} {rest}"
    return f"{options.get(name, spelled(name))}{first[len(name) :]} {rest}"


def percent(share: float | None) -> str:
    """A fraction as a percentage; a dash if there is none."""
    return "-" if share is None or not math.isfinite(share) else f"{share:.2%}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
