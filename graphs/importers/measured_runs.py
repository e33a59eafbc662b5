r"""Iterations that a user measured: rows of a CSV, and logs of training as they are.

The lines of logs are those of

- Megatron-LM (megatron/training/training.py, core 0.13) and Megatron-Bridge 0.4
  (src/megatron/bridge/training/utils/train_utils.py):
  ``iteration 20/ 500 | ... | elapsed time per iteration (ms): 9123.4 | ... | global batch size:
  512 |``; since 2026 the mean of the last iterations is behind a stroke (``9123.4/9120.1``);
- torchtitan 0.1 to 0.2 (torchtitan/components/metrics.py): ``step: 20  loss: ..  memory: 38.05GiB
  (40.1%)  tps: 7,012  tflops: ..  mfu: ..``, where tps are tokens per second and device;
- NeMo 1 and 2: ``global_step=20.00, .. train_step_timing in s=0.615`` of a progress bar, and
  ``iteration 20/99 | .. | global_batch_size: 512 | .. | train_step_timing in s: 9.31``; the ``Step
  Time : 9.26s GPU utilization: ..`` of Megatron-Bridge, which has no number;
- the Trainer of transformers: its summary ``'train_samples_per_second': 12.3``, if no other line
  is of an iteration; a mean with the warm-up;
- DeepSpeed 0.3 to 0.19: ``SamplesPerSec=`` (2020), ``CurrSamplesPerSec=`` and ``time (ms) | fwd:
  .. | bwd: .. | .. | step: ..`` (deepspeed/utils/timer.py), and ``steps: 20 loss: .. iter time (s):
  2.013`` of its pipelines (deepspeed/runtime/pipe/engine.py).
"""

import csv
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError

COLUMNS = ("layout", "seconds", "gpus", "sequence", "batch", "precision", "memory_gb")
"""Of a CSV; the first two must be there, an empty cell is as good as none."""

WARM_UP = 10
"""So many of the first logged iterations do not count, of fewer than twice as many half."""


@dataclass(frozen=True, slots=True)
class MeasuredIteration:
    """What a file says of an iteration; ``place`` is the file and the line, None what is not said.

    A log may have a throughput in place of ``seconds``: samples per second, or tokens per second
    and device.
    """

    place: str
    seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_device_second: float | None = None
    layout: str | None = None
    gpus: int | None = None
    sequence: int | None = None
    batch: int | None = None
    precision: str | None = None
    memory_bytes: float | None = None

    def seconds_of(self, gpus: int, sequence: int, batch: int) -> float:
        """Seconds of an iteration of so many samples of so many tokens on so many devices."""
        if self.samples_per_second is not None:
            return batch / self.samples_per_second
        if self.tokens_per_device_second is not None:
            return batch * sequence / (self.tokens_per_device_second * gpus)
        assert self.seconds is not None
        return self.seconds


def read_measured(path: str | os.PathLike[str]) -> tuple[MeasuredIteration, ...]:
    """The rows of a CSV, by its name, or the median iteration of a log.

    Raises InputError, with the line, if a row is wrong or a log has too few iterations.
    """
    if str(path).lower().endswith(".csv"):
        return _rows(path)
    return (_log(path),)


def read_outcome(
    path: str | os.PathLike[str], ended: bool = False
) -> MeasuredIteration | Literal["out of memory", "crashed"]:
    """What the log of one run says: its median iteration, or why it has none.

    A run that ``ended`` without an iteration has crashed, whatever its log says. Raises InputError
    if else the log tells neither.
    """
    text = documents.read_text(path)
    if _TOO_LARGE.search(text):
        return "out of memory"
    try:
        return _log(path)
    except InputError:
        if ended or _FAILED.search(text):
            return "crashed"
        raise


def _rows(path: str | os.PathLike[str]) -> tuple[MeasuredIteration, ...]:
    reader = csv.DictReader(documents.read_text(path).splitlines(), skipinitialspace=True)
    head = reader.fieldnames or ()
    unknown = [one for one in head if one not in COLUMNS]
    if unknown or not {"layout", "seconds"} <= {*head}:
        wrong = f"column {unknown[0]!r} is not known" if unknown else "no layout and seconds"
        raise InputError(
            f"{path}:1: {wrong}; columns are {', '.join(COLUMNS)}; layout and seconds must be there"
        )
    found = tuple(_row(f"{path}:{reader.line_num}", row) for row in reader)
    if not found:
        raise InputError(f"{path}: no row below the names of the columns")
    return found


def _row(place: str, row: Mapping[str | None, str | None]) -> MeasuredIteration:
    if None in row:
        raise InputError(f"{place}: more cells than columns")
    cells = {name: text.strip() for name, text in row.items() if name and text and text.strip()}
    if "layout" not in cells:
        raise InputError(f"{place}: no layout, for example p2 t4 d8 b1")
    memory = _positive(place, cells, "memory_gb") if "memory_gb" in cells else None
    return MeasuredIteration(
        place,
        seconds=_positive(place, cells, "seconds"),
        layout=cells["layout"],
        gpus=_count(place, cells, "gpus"),
        sequence=_count(place, cells, "sequence"),
        batch=_count(place, cells, "batch"),
        precision=cells.get("precision"),
        memory_bytes=None if memory is None else 1e9 * memory,
    )


def _positive(place: str, cells: Mapping[str, str], name: str) -> float:
    try:
        value = float(cells.get(name, ""))
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise InputError(f"{place}: {name} must be a number above 0, got {cells.get(name, '')!r}")
    return value


def _count(place: str, cells: Mapping[str, str], name: str) -> int | None:
    if name not in cells:
        return None
    value = _positive(place, cells, name)
    if value % 1:
        raise InputError(f"{place}: {name} must be a whole number, got {cells[name]!r}")
    return int(value)


_NUMBER = r"[\d,]*\.?\d+(?:e[+-]?\d+)?"
_LINES = tuple(
    re.compile(one)
    for one in (
        rf"iteration\s+(?P<step>\d+)/.*?elapsed time per iteration \(ms\):\s*(?P<ms>{_NUMBER})"
        r"(?:.*?global batch size:\s*(?P<batch>\d+))?",
        rf"iteration\s+(?P<step>\d+)/.*?(?:global_batch_size: (?P<batch>\d+).*?)?"
        rf"train_step_timing in s: (?P<seconds>{_NUMBER})",
        rf"global_step=(?P<step>{_NUMBER}).*?train_step_timing in s=(?P<seconds>{_NUMBER})",
        rf"Step Time : (?P<seconds>{_NUMBER})s GPU utilization",
        rf"(?<!validate )step:\s*(?P<step>\d+)\s+loss:.*?memory:\s*(?P<gib>{_NUMBER})GiB.*?"
        rf"tps:\s*(?P<tokens>{_NUMBER})",
        rf"steps:\s*(?P<step>\d+) loss:.*?iter time \(s\):\s*(?P<seconds>{_NUMBER})",
        rf"(?:global_step=|\d+/)(?P<step>\d+),.*?\b(?:Curr)?SamplesPerSec=(?P<samples>{_NUMBER})"
        rf"(?:.*?MaxMemAllocated=(?P<gib>{_NUMBER})GB)?",
        rf"time \(ms\) \| (?:fwd|forward): (?P<ms>{_NUMBER}) \| (?:bwd|backward): "
        rf"(?P<backward>{_NUMBER}) \|"
        rf".*?\| step: (?P<update>{_NUMBER})",
    )
)
"""A line of each kind of log: the step, and a time, parts of it, or a throughput."""
_PEAK = re.compile(rf"memory \(MB\) \|.*?max reserved: (?P<mb>{_NUMBER})")
"""What Megatron-LM and Megatron-Bridge log of every rank after the first iterations."""
_TOO_LARGE = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP)(?: error:)? out of memory|cudaErrorMemoryAllocation|"
    r"oom[-_]kill|Cannot allocate memory",
    re.IGNORECASE,
)
_FAILED = re.compile(
    r"Traceback \(most recent call last\)|^\w*(?:Error|Exception)\b|ChildFailedError|core dumped|"
    r"Segmentation fault|exit(?:ed with)? code:?\s+[1-9-]|srun: error|slurmstepd: error",
    re.MULTILINE,
)
_SUMMARY = re.compile(rf"train_samples_per_second\W+(?P<samples>{_NUMBER})")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def _log(path: str | os.PathLike[str]) -> MeasuredIteration:
    lines = [_COLOUR.sub("", one) for one in documents.read_text(path).splitlines()]
    for pattern in _LINES:
        found = [
            (number, {name: value for name, value in match.groupdict().items() if value})
            for number, line in enumerate(lines, 1)
            for match in [pattern.search(line)]
            if match is not None
        ]
        if found:
            return _with_peak(_median(path, found), lines)
    for number, line in enumerate(lines, 1):
        if (summary := _SUMMARY.search(line)) and _plain(summary["samples"]) > 0:
            samples = _plain(summary["samples"])
            return MeasuredIteration(f"{path}:{number}", samples_per_second=samples)
    raise InputError(
        f"{path}: no line of an iteration as Megatron, NeMo, torchtitan, DeepSpeed or transformers "
        "log it; a table of runs ends in .csv"
    )


def _with_peak(run: MeasuredIteration, lines: list[str]) -> MeasuredIteration:
    """The run with the peak of memory of the fullest rank, where lines of their own have it."""
    peaks = [_plain(match["mb"]) for match in map(_PEAK.search, lines) if match is not None]
    if run.memory_bytes is not None or not peaks:
        return run
    return replace(run, memory_bytes=2**20 * max(peaks))


def _median(
    path: str | os.PathLike[str], found: list[tuple[int, dict[str, str]]]
) -> MeasuredIteration:
    """The median of the iterations after the first ones; of several batches only the last's."""
    last = found[-1][1].get("batch")
    found = [(number, one) for number, one in found if one.get("batch") == last]
    numbered = [(int(_plain(one.get("step", str(number)))), one) for number, one in found]
    steps = sorted({step for step, _ in numbered})
    if len(steps) < 2:
        raise InputError(
            f"{path}:{found[0][0]}: the only iteration; give two or more, the first is a warm-up"
        )
    first = steps[min(WARM_UP, len(steps) // 2)]
    counted = [one for step, one in numbered if step >= first]
    place = f"{path}:{found[0][0]}-{found[-1][0]}"

    def middle(*names: str) -> float | None:
        """The median of the sums of these parts; None if the log has other parts."""
        values = [sum(_plain(one.get(name, "0")) for name in names) for one in counted]
        if not any(values):
            return None
        if not 0 < median(values) < 1e12:
            raise InputError(f"{place}: the median iteration has {median(values):g}")
        return median(values)

    milliseconds, memory = middle("ms", "backward", "update"), middle("gib")
    made = MeasuredIteration(
        place,
        seconds=middle("seconds") if milliseconds is None else milliseconds / 1e3,
        samples_per_second=middle("samples"),
        tokens_per_device_second=middle("tokens"),
        batch=None if last is None else int(last),
        memory_bytes=None if memory is None else 2**30 * memory,
    )
    if made.seconds is made.samples_per_second is made.tokens_per_device_second is None:
        raise InputError(f"{place}: the iterations take no time")
    return made


def _plain(text: str) -> float:
    """A number that may have commas between thousands."""
    return float(text.replace(",", ""))
