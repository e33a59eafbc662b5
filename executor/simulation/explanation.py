"""Why a plan is as slow as it is: critical path, bottleneck, and idle time by cause."""

from collections import defaultdict
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import numpy as np

from stagewright.executor.simulation.idle import Cause, Idle, idle_spans
from stagewright.executor.simulation.run import Run, is_complete, planned_run
from stagewright.executor.simulation.waiting import edges
from stagewright.formulations.plans.actions import (
    COMPUTE,
    ON_DEVICE,
    REDUCE,
    SEND_B,
    Action,
    Operation,
    parse_operation,
)
from stagewright.formulations.plans.periodic import iteration_seconds
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan, ScheduledAction
from stagewright.formulations.plans.timing import covered_seconds
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE


@dataclass(frozen=True, slots=True)
class Step:
    """An action of the path; it starts ``wait_seconds`` after the end of the step before it.

    The wait is 0 unless the plan itself delays the action (or a measured action started late).
    """

    entry: ScheduledAction
    action: Action
    wait_seconds: float

    @property
    def seconds(self) -> float:
        """How long the action takes."""
        return self.entry.finish_seconds - self.entry.start_seconds


def predecessors(run: Run, pairs: list[tuple[int, int]]) -> list[list[int]]:
    """For each entry, the entries that it waits for; ``pairs`` are entries (before, after)."""
    found: list[list[int]] = [[] for _ in run.actions]
    for before, after in pairs:
        found[after].append(before)
    return found


def critical_path(run: Run, before: list[list[int]]) -> tuple[Step, ...]:
    """A chain from the start of the iteration to its end, each action after the one it waits for.

    From the action that ends last it goes back to the one that ended last of those that an action
    waits for; of equal ones to the one on the same device. Its seconds and waits add up to the
    iteration (Kelley, Critical-Path Planning and Scheduling: Mathematical Basis, 1961).
    """
    entries, steps = run.plan.actions, list[Step]()
    if not entries:
        return ()
    i: int | None = max(range(len(entries)), key=lambda k: entries[k].finish_seconds)
    while i is not None:
        one = entries[i]
        last = max(
            before[i],
            key=lambda k: (entries[k].finish_seconds, entries[k].device == one.device),
            default=None,
        )
        ended = 0.0 if last is None else entries[last].finish_seconds
        steps.append(Step(one, run.actions[i], one.start_seconds - ended))
        i = last
    return tuple(reversed(steps))


@dataclass(frozen=True, slots=True)
class Resource:
    """A device, channel or all-reduce that is busy for ``seconds`` of an iteration.

    ``stages`` are the device's, the two at the ends of a channel, or the one that all-reduces.
    ``devices`` are those with the same load and stages; empty for a channel or all-reduce.
    """

    kind: str
    stages: tuple[int, ...]
    devices: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    """Where an iteration's time goes.

    ``path`` is the critical path and ``idle`` the idle intervals; both are empty for a periodic
    plan, whose iterations overlap. ``busy_seconds`` and ``idle_seconds`` (by cause) are each
    device's; together they are the iteration. ``device`` is the busiest device, ``bottleneck`` the
    busiest resource of all.
    """

    iteration_seconds: float
    path: tuple[Step, ...]
    idle: tuple[Idle, ...]
    busy_seconds: dict[str, float]
    idle_seconds: dict[str, dict[Cause, float]]
    device: Resource
    bottleneck: Resource


def explain_plan(plan: PipelinePlan) -> PlanExplanation | None:
    """Where the time of an iteration goes, by the plan's own times.

    None if the schedule lacks actions that the stages need, or takes no time, or is no iteration:
    the end of a run of several, which is what is measured of a periodic plan, updates weights
    before computations that an update of one iteration would wait for.
    """
    if isinstance(plan.schedule, PeriodicSchedule):
        return _of_periods(plan, plan.schedule)
    if not is_complete(plan):
        return None
    run = planned_run(plan, plan.microbatches)
    end = max(entry.finish_seconds for entry in plan.actions)
    if end <= 0:
        return None
    before = predecessors(run, [*edges(run)])
    if not _is_acyclic(before):
        return None
    idle = tuple(idle_spans(run, before, end))
    sums = defaultdict[str, dict[Cause, float]](dict)
    for one in idle:
        sums[one.device][one.cause] = sums[one.device].get(one.cause, 0.0) + one.seconds
    busy, links = _busy(run)
    device = _busiest(plan, busy)
    return PlanExplanation(
        iteration_seconds=end,
        path=critical_path(run, before),
        idle=idle,
        busy_seconds=busy,
        idle_seconds={name: sums[name] for name in busy},
        device=device,
        bottleneck=_bottleneck(device, links),
    )


def _is_acyclic(before: list[list[int]]) -> bool:
    """Whether no entry waits for itself, directly or through other entries."""
    try:
        TopologicalSorter(dict(enumerate(before))).prepare()
    except CycleError:
        return False
    return True


_Links = dict[tuple[str, tuple[int, ...]], float]
"""Seconds of channels and all-reduces, by the kind of resource and its stages."""


def _busy(run: Run) -> tuple[dict[str, float], _Links]:
    """Seconds in which each device computes, and in which each channel or all-reduce runs."""
    names = dict.fromkeys(name for stage in run.plan.stages for name in stage.devices)
    devices: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    links = defaultdict[tuple[str, tuple[int, ...]], list[tuple[float, float]]](list)
    for action, entry in zip(run.actions, run.plan.actions, strict=True):
        span = (entry.start_seconds, entry.finish_seconds)
        if action.kind in ON_DEVICE:
            devices[entry.device].append(span)
        else:
            links[_link(action)].append(span)
    return (
        {name: _covered(spans) for name, spans in devices.items()},
        {link: _covered(spans) for link, spans in links.items()},
    )


def _covered(spans: list[tuple[float, float]]) -> float:
    starts, ends = np.array(spans, dtype=float).reshape(-1, 2).T
    return float(covered_seconds(starts, ends)) if spans else 0.0


def _link(action: Action | Operation) -> tuple[str, tuple[int, ...]]:
    if action.kind is REDUCE:
        return "all-reduce", (action.stage,)
    first = action.stage - (action.kind is SEND_B)
    return "channel", (first, first + 1)


def _busiest(plan: PipelinePlan, busy: dict[str, float]) -> Resource:
    """The device that computes longest, with those that have its stages and load."""
    most = max(busy.values())
    first = next(name for name, seconds in busy.items() if seconds == most)
    same = (
        name
        for name, seconds in busy.items()
        if most - seconds <= RELATIVE_TOLERANCE * most
        and _stages(plan, name) == _stages(plan, first)
    )
    return Resource("device", _stages(plan, first), tuple(same), most)


def _stages(plan: PipelinePlan, device: str) -> tuple[int, ...]:
    return tuple(s for s, stage in enumerate(plan.stages) if device in stage.devices)


def _bottleneck(device: Resource, links: _Links) -> Resource:
    """The busiest device, or a channel or all-reduce that is busier."""
    key = max(links, key=lambda one: links[one], default=None)
    if key is None or links[key] <= device.seconds * (1 + RELATIVE_TOLERANCE):
        return device
    return Resource(*key, (), links[key])


def _of_periods(plan: PipelinePlan, schedule: PeriodicSchedule) -> PlanExplanation | None:
    """The explanation of a periodic plan by the loads of an iteration: periods, and the pause."""
    whole = iteration_seconds(schedule, plan.microbatches)
    busy = dict.fromkeys((name for stage in plan.stages for name in stage.devices), 0.0)
    links = defaultdict[tuple[str, tuple[int, ...]], float](float)
    for one in schedule.actions:
        operation = parse_operation(one.action)
        if operation.kind in COMPUTE:
            busy[one.device] += one.seconds * _times(plan, operation.stage, one.device)
        else:
            rounds = 1 if operation.kind is REDUCE else plan.microbatches
            links[_link(operation)] += one.seconds * rounds
    idle = {
        name: {
            cause: seconds
            for cause, seconds in (
                (Cause.PAUSE, schedule.pause_seconds),
                (Cause.PERIOD, whole - schedule.pause_seconds - load),
            )
            if seconds > RELATIVE_TOLERANCE * whole
        }
        for name, load in busy.items()
    }
    device = _busiest(plan, busy)
    return PlanExplanation(whole, (), (), busy, idle, device, _bottleneck(device, links))


def _times(plan: PipelinePlan, stage: int, device: str) -> int:
    """How many microbatches of an iteration a device of a stage computes."""
    return sum(device in plan.runners(stage, m) for m in range(plan.microbatches))
