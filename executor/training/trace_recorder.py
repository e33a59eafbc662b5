"""The trace of a run: the recordings of all ranks, gathered on the first."""

import os
import platform
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import BinaryIO

import torch
import torch.distributed as dist

from stagewright.executor.measuring.machine import reference_seconds, typical
from stagewright.executor.programs.trace import (
    MeasuredMemory,
    MemoryKind,
    RankAction,
    Trace,
    TracedStep,
)
from stagewright.executor.training.ranks.rank import RankPlace, gathered
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError

_SCHEDULING = Path("/proc/thread-self/schedstat")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"


def waited_seconds() -> float | None:
    """How long this thread has been ready to run without a core; None but on Linux."""
    with suppress(OSError, IndexError):
        file = _scheduling(threading.get_native_id())
        return 1e-9 * int(os.pread(file.fileno(), 64, 0).split()[1])
    return None


@cache
def _scheduling(thread: int) -> BinaryIO:
    """The calling thread's file, kept open: to open it takes as long as a small computation."""
    del thread
    return _SCHEDULING.open("rb")


class MemoryMeter:
    """The most memory that a rank has from now on.

    On a GPU it is what torch has allocated in this process. On a CPU it is resident memory above
    that of now: a model that is made later counts, one that was made before does not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._base = device, 0.0
        reference_seconds(device)  # takes its memory, which is not the model's
        if device.type == "cpu":
            with suppress(OSError):
                CLEAR.write_text(_FORGET_PEAK)
            self._base = _resident("VmRSS") or 0.0

    @property
    def kind(self) -> MemoryKind:
        """The kind of memory: allocated on a GPU, or resident."""
        return "resident" if self._device.type == "cpu" else "allocated"

    def peak_bytes(self) -> float | None:
        """The peak so far; None where the system does not tell."""
        if self._device.type != "cpu":
            return float(torch.cuda.max_memory_allocated(self._device))
        peak = _resident("VmHWM")
        return None if peak is None else max(0.0, peak - self._base)


def _resident(name: str) -> float | None:
    """An entry of this process's status, in bytes; None but on Linux."""
    with suppress(OSError):
        found = re.search(rf"^{name}:\s*(\d+) kB", STATUS.read_text(), re.MULTILINE)
        if found is not None:
            return 1024.0 * int(found[1])
    return None


MEETINGS = 15  # barriers of all ranks before a run that is traced


@dataclass(slots=True)
class Recording:
    """The actions of this rank from ``step`` until no mini-batch was in flight.

    Times are on its own clock; ``met_seconds`` are its readings after barriers of all ranks,
    ``reference_seconds`` say how fast the machine is.
    """

    step: int
    reference_seconds: float | None
    met_seconds: list[float]
    losses: list[float] = field(default_factory=list)
    records: list[RankAction] = field(default_factory=list)
    iterations: int | None = None

    @property
    def loss(self) -> float | None:
        """The mean loss, on ranks of the last stage."""
        return fmean(self.losses) if self.losses else None

    def begin(self, first: "Recording") -> float:
        """The common start on this rank's clock; ``first`` is the first rank's recording."""
        pairs = zip(self.met_seconds, first.met_seconds, strict=True)
        return first.met_seconds[-1] + median(own - its for own, its in pairs)


def _records_since(start: float, records: Sequence[RankAction]) -> list[RankAction]:
    """The records with times that count from ``start``."""
    return [
        replace(
            one,
            start_seconds=max(0.0, one.start_seconds - start),
            finish_seconds=max(0.0, one.finish_seconds - start),
        )
        for one in records
    ]


class TraceRecorder:
    """Recordings of this rank, one for each step; with a periodic plan, one for each drain.

    ``traced`` makes a step from its number, the records of all ranks, the mean loss that the rank
    ``reporter`` knows, and the number of mini-batches, where these overlap. Without ``on`` nothing
    is recorded; the peaks of memory are, where there is a ``meter``.
    """

    def __init__(
        self,
        place: RankPlace,
        plan: PipelinePlan | OperatorPlan,
        dtype: torch.dtype,
        traced: Callable[[int, list[RankAction], float | None, int | None], TracedStep],
        reporter: int,
        *,
        on: bool,
        meter: MemoryMeter | None = None,
    ) -> None:
        self._place, self._plan, self._dtype = place, plan, dtype
        self._traced, self._reporter, self._on, self._meter = traced, reporter, on, meter
        self._overlaps = isinstance(plan, PipelinePlan) and plan.is_periodic
        self._current: Recording | None = None
        self._done: list[Recording] = []

    def begin(self, step: int) -> None:
        """Begin a recording at ``step``, unless one is open. All ranks call it."""
        if self._on and self._current is None:
            reference = reference_seconds(self._place.device)
            self._current = Recording(step, reference, self._meetings())

    def _meetings(self) -> list[float]:
        """Times after barriers of all ranks, by which their clocks are compared.

        Ranks leave a barrier milliseconds apart if one of them waits for its processor; over
        several barriers the median is exact enough for a long run.
        """
        found = []
        for _ in range(MEETINGS if self._overlaps else 1):
            if self._place.group is not None:
                dist.barrier(self._place.group)
            found.append(time.perf_counter())
        return found

    @property
    def records(self) -> list[RankAction] | None:
        """Where the interpreter adds the times of instructions; None without a recording."""
        return None if self._current is None else self._current.records

    def add_losses(self, losses: list[float]) -> None:
        """Note the losses of mini-batches that ended."""
        if self._current is not None:
            self._current.losses += losses

    def end(self, steps_done: int) -> None:
        """End the open recording, if there is one, after so many steps."""
        recording, self._current = self._current, None
        if recording is None:
            return
        if self._overlaps:
            recording.iterations = steps_done - recording.step
        self._done.append(recording)

    def trace_on_first_rank(self) -> Trace | None:
        """The trace of all steps on rank 0; None on the others. All ranks call it.

        Raises InputError if no step was recorded.
        """
        place, plan = self._place, self._plan
        between_losses = isinstance(plan, PipelinePlan) and plan.is_backward_first
        if between_losses and self._on and not self._done:
            raise InputError(
                "there is nothing to trace: a step of a plan that begins with the backwards is "
                "recorded from the second one after a checkpoint on; train on more steps"
            )
        shares = gathered(place, self._done)
        memory = self._memory()
        if shares is None:
            return None
        steps = tuple(
            self._traced(
                own.step,
                [
                    record
                    for share in shares
                    for record in _records_since(share[i].begin(own), share[i].records)
                ],
                shares[self._reporter][i].loss,
                own.iterations,
            )
            for i, own in enumerate(self._done)
        )
        by_rank = (typical(one.reference_seconds for one in share) for share in shares)
        return Trace(
            digest=plan.digest,
            model=plan.model,
            machine=f"{platform.node()}, {os.cpu_count()} CPUs, {place.device.type}",
            backend="none" if place.group is None else dist.get_backend(place.group),
            world_size=len(place.devices),
            dtype=str(self._dtype).removeprefix("torch."),
            steps=steps,
            memory=memory,
            reference_seconds=typical(by_rank, fmean),
        )

    def _memory(self) -> MeasuredMemory | None:
        """The peak of every rank, on rank 0; None if one does not know it."""
        meter, place = self._meter, self._place
        peaks = gathered(place, None if meter is None else meter.peak_bytes())
        known = [peak for peak in peaks or () if peak is not None]
        if meter is None or len(known) < len(place.devices):
            return None
        return MeasuredMemory(meter.kind, dict(zip(place.devices, known, strict=True)))
