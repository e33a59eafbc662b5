"""The trace of a run: the recordings of all ranks, gathered on the first."""

import os
import platform
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from stagewright.executor.programs.trace import (
    MeasuredMemory,
    RankAction,
    Trace,
    TracedStep,
    traced_step,
)
from stagewright.executor.training.process import MemoryMeter
from stagewright.executor.training.ranks.collectives import gathered
from stagewright.executor.training.ranks.rank import Place, Rank
from stagewright.executor.training.recording import MEETINGS, Recording, meet, records_since
from stagewright.graphs.documents.errors import InputError


class TraceRecorder:
    """Recordings of this rank, one for each step; with a periodic plan, one for each drain.

    Without a ``meter`` of this rank's memory nothing is recorded.
    """

    def __init__(self, rank: Rank, dtype: torch.dtype, meter: MemoryMeter | None) -> None:
        self._rank, self._dtype, self._meter = rank, dtype, meter
        self._current: Recording | None = None
        self._done: list[Recording] = []

    def begin(self, step: int) -> None:
        """Begin a recording at ``step``, unless one is open. All ranks call it."""
        if self._meter is not None and self._current is None:
            self._current = Recording(step, self._meetings())

    def _meetings(self) -> list[float]:
        """Times after barriers of all ranks, by which their clocks are compared.

        Ranks leave a barrier milliseconds apart if one of them waits for its processor; over
        several barriers the median is exact enough for a long run.
        """
        found = []
        for _ in range(MEETINGS if self._rank.plan.is_periodic else 1):
            meet(self._rank.group)
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
        if self._rank.plan.is_periodic:
            recording.iterations = steps_done - recording.step
        self._done.append(recording)

    def trace_on_first_rank(self) -> Trace | None:
        """The trace of all steps on rank 0; None on the others. All ranks call it.

        Raises
        ------
        InputError
            If no step of a plan between two losses was recorded.
        """
        if self._rank.plan.is_backward_first and self._meter and not self._done:
            raise InputError(
                "there is nothing to trace: a step of a plan that begins with the backwards is "
                "recorded from the second one after a checkpoint on; train on more steps"
            )
        shares = gathered(self._rank, self._done)
        memory = self._memory()
        if shares is None:
            return None
        rank, plan = self._rank, self._rank.plan
        reporter = rank.first(len(plan.stages) - 1)
        steps = tuple(
            traced_step(
                plan,
                own.step,
                [
                    record
                    for share in shares
                    for record in records_since(share[i].begin(own), share[i].records)
                ],
                shares[reporter][i].loss,
                own.iterations,
            )
            for i, own in enumerate(self._done)
        )
        trace = trace_of(rank, plan.digest, plan.model, self._dtype, steps)
        return replace(trace, memory=memory)

    def _memory(self) -> MeasuredMemory | None:
        """The peak of every rank, on rank 0; None if one does not know it."""
        meter, rank = self._meter, self._rank
        peaks = gathered(rank, None if meter is None else meter.peak_bytes())
        known = [peak for peak in peaks or () if peak is not None]
        if meter is None or len(known) < len(rank.devices):
            return None
        return MeasuredMemory(meter.kind, dict(zip(rank.devices, known, strict=True)))


def trace_of(
    place: Place, digest: str, model: str, dtype: torch.dtype, steps: tuple[TracedStep, ...]
) -> Trace:
    """The trace of a run on this machine."""
    return Trace(
        digest=digest,
        model=model,
        machine=f"{platform.node()}, {os.cpu_count()} CPUs, {place.device.type}",
        backend="none" if place.group is None else dist.get_backend(place.group),
        world_size=len(place.devices),
        dtype=str(dtype).removeprefix("torch."),
        steps=steps,
    )
