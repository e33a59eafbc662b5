"""Why a plan is as slow as it is: critical path, bottleneck, and idle time by cause."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import numpy as np

from stagewright.executor.simulation.idle import Idle, IdleCause, idle_spans
from stagewright.executor.simulation.run import Run, is_complete, planned_run
from stagewright.executor.simulation.waiting import edges
from stagewright.formulations.checking.certificates import headlines
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
from stagewright.graphs.documents.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class PathStep:
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


def critical_path(run: Run, before: list[list[int]]) -> tuple[PathStep, ...]:
    """A chain from the start of the iteration to its end, each action after the one it waits for.

    From the action that ends last it goes back to the one that ended last of those that an action
    waits for; of equal ones to the one on the same device. Its seconds and waits add up to the
    iteration (Kelley, Critical-Path Planning and Scheduling: Mathematical Basis, 1961).
    """
    entries, steps = run.plan.actions, list[PathStep]()
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
        steps.append(PathStep(one, run.actions[i], one.start_seconds - ended))
        i = last
    return tuple(reversed(steps))


@dataclass(frozen=True, slots=True)
class BusyResource:
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
    path: tuple[PathStep, ...]
    idle: tuple[Idle, ...]
    busy_seconds: dict[str, float]
    idle_seconds: dict[str, dict[IdleCause, float]]
    device: BusyResource
    bottleneck: BusyResource


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
    sums = defaultdict[str, dict[IdleCause, float]](dict)
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


def _busiest(plan: PipelinePlan, busy: dict[str, float]) -> BusyResource:
    """The device that computes longest, with those that have its stages and load."""
    most = max(busy.values())
    first = next(name for name, seconds in busy.items() if seconds == most)
    same = (
        name
        for name, seconds in busy.items()
        if most - seconds <= RELATIVE_TOLERANCE * most
        and _stages(plan, name) == _stages(plan, first)
    )
    return BusyResource("device", _stages(plan, first), tuple(same), most)


def _stages(plan: PipelinePlan, device: str) -> tuple[int, ...]:
    return tuple(s for s, stage in enumerate(plan.stages) if device in stage.devices)


def _bottleneck(device: BusyResource, links: _Links) -> BusyResource:
    """The busiest device, or a channel or all-reduce that is busier."""
    key = max(links, key=lambda one: links[one], default=None)
    if key is None or links[key] <= device.seconds * (1 + RELATIVE_TOLERANCE):
        return device
    return BusyResource(*key, (), links[key])


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
                (IdleCause.PAUSE, schedule.pause_seconds),
                (IdleCause.PERIOD, whole - schedule.pause_seconds - load),
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


_UNEVEN = 1.02  # times the mean work of the devices; less is not worth a sentence
MOST_STAGES = 3  # of the critical path's, named with their shares


def explanation_sentences(plan: PipelinePlan, found: PlanExplanation | None) -> tuple[str, ...]:
    """Sentences on the bottleneck, the busiest device's idle time, and the critical path."""
    return () if found is None else (*_binding(plan, found), *_path(found))


def resource_name(one: BusyResource) -> str:
    """The resource in a sentence: ``stage 3 (s0g0 and 3 more)``."""
    numbers = ", ".join(map(str, one.stages))
    if one.kind == "channel":
        return f"the channel between stages {one.stages[0]} and {one.stages[1]}"
    if one.kind == "all-reduce":
        return f"the all-reduce of stage {numbers}"
    more = f" and {len(one.devices) - 1} more" if len(one.devices) > 1 else ""
    return f"stage{'s' if len(one.stages) > 1 else ''} {numbers} ({one.devices[0]}{more})"


def _binding(plan: PipelinePlan, found: PlanExplanation) -> Iterator[str]:
    whole, device, most = found.iteration_seconds, found.device, found.bottleneck
    works = f"works for {device.seconds / whole:.1%} of the {format_seconds(whole)} of an iteration"
    if most is device:
        first = f"The bottleneck is {resource_name(device)}: it {works}"
    else:
        first = (
            f"The bottleneck is {resource_name(most)}, in use for {most.seconds / whole:.1%} of an "
            f"iteration; the busiest device, of {resource_name(device)}, {works}"
        )
    idle = found.idle_seconds[device.devices[0]]
    parts = [
        f"{seconds / whole:.1%} {cause}"
        for cause, seconds in sorted(idle.items(), key=lambda one: -one[1])
        if seconds >= 0.0005 * whole
    ]
    yield f"{first}, and is idle {_listed(parts)}." if parts else f"{first}."
    if IdleCause.MEMORY in idle:
        yield from _memory(plan, device.devices[0])
    yield from _balance(found)


def _balance(found: PlanExplanation) -> Iterator[str]:
    """A sentence on how much longer the busiest device works than the mean device."""
    mean = sum(found.busy_seconds.values()) / len(found.busy_seconds)
    most = max(found.busy_seconds.values())
    if most > _UNEVEN * mean:
        yield (
            f"On average the devices in use work for {mean / found.iteration_seconds:.1%} of an "
            f"iteration, the busiest {most / mean:.2f} times as long."
        )


def _memory(plan: PipelinePlan, device: str) -> Iterator[str]:
    """How full the memory is that keeps forwards back."""
    stated = plan.predicted
    if stated is None or device not in stated.peak_memory_bytes:
        return
    peak, capacity = stated.peak_memory_bytes[device], stated.capacity_bytes.get(device)
    of = "" if capacity is None else f" of {format_bytes(capacity)}"
    yield f"Its peak memory is {format_bytes(peak)}{of}."


def _path(found: PlanExplanation) -> Iterator[str]:
    """A sentence on the parts of the critical path, the largest first."""
    if not found.path:
        return
    stages, others = defaultdict[int, float](float), defaultdict[str, float](float)
    for step in found.path:
        others["waits of the plan"] += step.wait_seconds
        if step.action.kind in ON_DEVICE:
            stages[step.action.stage] += step.seconds
        else:
            reduces = step.action.kind is REDUCE
            others["all-reduces" if reduces else "transfers"] += step.seconds
    ordered = sorted(stages.items(), key=lambda one: -one[1])
    named = ordered if len(ordered) <= MOST_STAGES + 1 else ordered[:MOST_STAGES]
    parts = [(seconds, f"computing on stage {s}") for s, seconds in named]
    rest = sum(seconds for _, seconds in ordered[len(named) :])
    parts.append((rest, f"computing on {len(ordered) - len(named)} other stages"))
    parts += [(seconds, what) for what, seconds in others.items()]
    whole = found.iteration_seconds
    texts = [
        f"{seconds / whole:.1%} {what}"
        for seconds, what in sorted(parts, key=lambda one: -one[0])
        if seconds >= 0.0005 * whole
    ]
    yield (
        "On the critical path, the longest chain of actions that wait for each other, the "
        f"iteration is {_listed(texts)}."
    )


def proof_sentences(plan: PipelinePlan) -> Iterator[str]:
    """Sentences on the proof: no plan of a class is faster than its bound."""
    if plan.certificate is None:
        yield "No lower bound is known: nothing is proved about how much faster a plan can be."
        return
    for one in headlines(plan.certificate):
        saved = f"at most {one.gap:.2%}" if one.gap > RELATIVE_TOLERANCE else "nothing"
        yield (
            f"{format_seconds(one.seconds)} is a lower bound for {one.plans}{plan.of_sizes}, "
            f"by {one.proved_by}: {saved} can be saved there."
        )


def _listed(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
