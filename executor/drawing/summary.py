"""A table of a plan's stages."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagewright.executor.drawing.timeline import blocks_of, stages_name
from stagewright.formulations.plans.actions import ActionKind, Operation, parse_operation
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan

ENDS_BACKWARD = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)


@dataclass(frozen=True, slots=True)
class StageSummary:
    """A row for one stage: times are per microbatch, memory and in-flight are peaks.

    ``shares_with`` are the other stages on any of its devices; ``shifts`` are the index shifts of
    its forward and of the end of its backward, None in a finite plan.
    """

    stage: int
    layers: tuple[int, int]
    devices: tuple[str, ...]
    replicas: int
    forward_seconds: float
    backward_seconds: float
    in_flight: int
    peak_memory_bytes: float | None
    shares_with: tuple[int, ...] = ()
    shifts: tuple[int, int] | None = None


Curve = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Steps of a count over time: times in seconds, and the count from each on."""


def summarise(
    plan: PipelinePlan, flights: Sequence[Curve] | None = None
) -> tuple[StageSummary, ...]:
    """A line per stage; times and in-flight counts are read from the schedule.

    ``flights`` are those of :func:`in_flight`, where they are known.
    """
    longest: dict[tuple[int, ActionKind], float] = defaultdict(float)
    for _, block in blocks_of(plan, {stage.devices[0] for stage in plan.stages}):
        key = (block.action.stage, block.action.kind)
        longest[key] = max(longest[key], block.finish_seconds - block.start_seconds)
    peaks = plan.predicted.peak_memory_bytes if plan.predicted else {}
    flights, shifts = flights or in_flight(plan), _shifts(plan)
    return tuple(
        StageSummary(
            s,
            stage.layers,
            stage.devices,
            stage.replicas,
            longest[s, ActionKind.FORWARD],
            max(
                longest[s, ActionKind.BACKWARD],
                longest[s, ActionKind.INPUT_GRADIENT] + longest[s, ActionKind.WEIGHT_GRADIENT],
            ),
            int(flights[s][1].max(initial=0)),
            max((peaks[device] for device in stage.devices if device in peaks), default=None),
            tuple(
                t
                for t, other in enumerate(plan.stages)
                if t != s and not set(other.devices).isdisjoint(stage.devices)
            ),
            shifts[s] if shifts else None,
        )
        for s, stage in enumerate(plan.stages)
    )


def shifts_text(line: StageSummary) -> str:
    """The index shifts of a stage's forward and backward."""
    return "" if line.shifts is None else f"F {line.shifts[0]}, B {line.shifts[1]}"


def shared_text(line: StageSummary) -> str:
    """The other stages on a stage's devices."""
    return stages_name(line.shares_with) if line.shares_with else "-"


def _shifts(plan: PipelinePlan) -> list[tuple[int, int]]:
    """Per stage the index shifts of its forward and of its backward's end; empty if finite."""
    if not isinstance(plan.schedule, PeriodicSchedule):
        return []
    found = {parse_operation(one.action): one.shift for one in plan.schedule.actions}
    return [
        (
            found.get(Operation(s, ActionKind.FORWARD), 0),
            max(found.get(Operation(s, kind), 0) for kind in ENDS_BACKWARD),
        )
        for s in range(len(plan.stages))
    ]


def in_flight(plan: PipelinePlan) -> list[Curve]:
    """Per stage the steps (times, counts) of microbatches in flight on its first device.

    A microbatch is in flight from the start of its forward to the end of its backward; between two
    losses, all of the first are from the start.
    """
    first = [stage.devices[0] for stage in plan.stages]
    held = [0] * len(first)
    if plan.is_backward_first:
        every = range(plan.microbatches)
        held = [sum(name in plan.runners(s, m) for m in every) for s, name in enumerate(first)]
    changes: list[list[tuple[float, int]]] = [[] for _ in first]
    for device, block in blocks_of(plan, set(first)):
        s = block.action.stage
        if device == first[s] and block.action.kind is ActionKind.FORWARD:
            changes[s].append((block.start_seconds, 1))
        elif device == first[s] and block.action.kind in ENDS_BACKWARD:
            changes[s].append((block.finish_seconds, -1))
    curves = []
    for steps, count in zip(changes, held, strict=True):
        net: dict[float, int] = defaultdict(int, {0.0: count})
        for time, change in steps:
            net[time] += change
        times = sorted(net)
        curves.append((np.array(times), np.cumsum([net[time] for time in times])))
    return curves
