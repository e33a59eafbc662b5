"""Records of every step, and log files of these records."""

import csv
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

from stagewright.graphs.documents.errors import InputError

_FLUSH_SECONDS = 10


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step of a run, from 1, on the rank that knows the losses.

    ``learning_rate`` is that of the rank's first group of parameters when the step began, None
    where it trains none. ``peak_bytes`` is the most memory that any rank has had so far, as far as
    this one knows: allocated on its GPU, or resident in the process. ``evaluation_loss`` is the
    mean loss of the held-out mini-batches after the step, None where it was not evaluated.
    """

    step: int
    loss: float
    samples_per_second: float
    seconds: float
    learning_rate: float | None
    peak_bytes: int
    evaluation_loss: float | None = None


OnStep = Callable[[StepReport], None]
COLUMNS = [one.name for one in fields(StepReport)]


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has had so far; see `StepReport`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def require_tensorboard(folder: Path | None) -> None:
    """Refuse a folder for tensorboard where it is not installed."""
    if folder is not None and find_spec("tensorboard") is None:
        raise InputError(f"{folder} needs the package tensorboard: pip install tensorboard")


@contextmanager
def logging_to(path: Path | None, folder: Path | None) -> Iterator[OnStep]:
    """Log steps to a CSV file and to a folder for tensorboard, until the body ends.

    Nothing is opened before the first step, so that only the rank that knows the losses writes.
    Rows of steps before that one stay, for a run that is resumed.
    """
    rows = None if path is None else CsvLog(path)
    board = None if folder is None else BoardLog(folder)

    def log(report: StepReport) -> None:
        for one in (rows, board):
            if one is not None:
                one(report)

    try:
        yield log
    finally:
        if board is not None:
            board.close()


class CsvLog:
    """A row of a file for each step, which is there as soon as the step is known."""

    def __init__(self, path: Path) -> None:
        self._path, self._last, self._row = path, 0, 0

    def __call__(self, report: StepReport) -> None:
        """Add a row, or write the last one again if it is of the same step."""
        if not self._last:
            self._begin(report.step)
        with self._path.open("r+", newline="") as file:
            if report.step != self._last:
                self._last, self._row = report.step, file.seek(0, os.SEEK_END)
            file.seek(self._row)
            csv.writer(file).writerow([getattr(report, name) for name in COLUMNS])

    def _begin(self, step: int) -> None:
        """Keep the rows before ``step`` of an earlier run; there are none for a new one."""
        kept: list[list[str]] = []
        if step > 1 and self._path.exists():
            with self._path.open(newline="") as file:
                head, *rows = [*csv.reader(file)] or [[]]
            if head == COLUMNS:
                kept = [row for row in rows if len(row) == len(COLUMNS) and int(row[0]) < step]
        with self._path.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *kept])


class BoardLog:
    """Curves for tensorboard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._last = 0

    def __call__(self, report: StepReport) -> None:
        """Add a point to every curve; to that of evaluations alone if the others have it."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            self._writer = SummaryWriter(
                str(self._folder), purge_step=report.step, flush_secs=_FLUSH_SECONDS
            )
        names = ["evaluation_loss"] if report.step == self._last else COLUMNS[1:]
        self._last = report.step
        for name in names:
            value = getattr(report, name)
            if value is not None:
                self._writer.add_scalar(name, value, report.step)

    def close(self) -> None:
        """Write the remaining points."""
        if self._writer is not None:
            self._writer.close()
