"""Why iterations take longer or shorter than predicted: replays with one cause at a time.

The plan's order is replayed as in the cost model, with the plan's durations except those of one
kind of action, which are the measured ones. By how much this iteration is longer is what the cause
accounts for. The replay with all measured durations is shorter than the measured iteration by the
time between actions, which no action's duration explains. Causes that hide each other, or add to
each other, do not add up to the difference: the rest is stated.

Measured durations are those of the steps in the middle half by time. A transfer, or an all-reduce,
is counted from when all that it needs has ended, so that waiting for a slow rank is not a part of
it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from stagewright.executor.measuring.pairs import (
    BACKWARD,
    Pair,
    counted_steps,
    pair_entries,
    steps_in_the_middle,
)
from stagewright.executor.programs.trace import Trace, TracedStep
from stagewright.executor.simulation.run import Run, either, is_complete, planned_run
from stagewright.executor.simulation.waiting import Replay
from stagewright.formulations.plans.actions import (
    ON_DEVICE,
    REDUCE,
    SEND_B,
    SEND_F,
    UPDATE,
    Action,
    ActionKind,
    B,
    F,
    W,
)
from stagewright.formulations.plans.periodic import steady_microbatches, unroll_run
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan
from stagewright.graphs.documents.arrays import Bools, Floats

KINDS: dict[str, tuple[ActionKind, ...]] = {
    "forwards": (F,),
    "backwards": BACKWARD,
    "transfers": (SEND_F, SEND_B),
    "all-reduces": (REDUCE,),
    "updates": (UPDATE,),
}
WAITING = "waiting for a core"
BETWEEN = "between actions"
PLANNED_WAITS = "waits in the plan"

ROUNDING = 1e-12
"""Seconds up to this share of an iteration are differences of rounding."""

LATE = 0.1
"""A message is late if its receiver had nothing else to do for this share of its time."""


@dataclass(frozen=True, slots=True)
class TimeCause:
    """The seconds of an iteration that a cause accounts for; negative if it is shorter by them.

    ``work`` are the seconds of its actions together, of an iteration on all devices; None of a
    cause that is not a kind of action. ``stages`` are the stages' shares, each replayed alone;
    transfers belong to the first of the two stages. ``devices`` are those of the devices, of what
    happens on one. Only the largest cause has them.
    """

    name: str
    seconds: float
    work: Pair | None = None
    stages: tuple["StageShare", ...] = ()
    devices: tuple["DeviceShare", ...] = ()


@dataclass(frozen=True, slots=True)
class StageShare:
    """Seconds due to a cause if only one stage has its measured times."""

    stage: int
    seconds: float
    work: Pair


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """Seconds due to a cause if only one device has its measured times."""

    device: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The causes; with ``rest_seconds`` they add up to the measured minus the predicted seconds.

    ``largest`` is the one that accounts for most, in the direction of the difference; None if
    there is no difference. ``without_waits_seconds`` is the iteration by a replay of all that was
    measured but the waits for a core; None where no wait was.
    """

    causes: tuple[TimeCause, ...]
    rest_seconds: float
    largest: TimeCause | None
    without_waits_seconds: float | None


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRun:
    """Seconds by entry of a run (rows) and measured step (columns).

    ``measured`` are without ``waited``, the time in which a computation had no core. ``gaps`` are
    those before an entry, from when all that it needs has ended. ``pace``
    gives the seconds of iterations from the ends of all entries, ``iteration`` are the measured
    ones, and ``pause`` what comes on top of an iteration.
    """

    run: Run
    replay: Replay
    measured: Floats
    waited: Floats
    gaps: Floats
    pace: Callable[[Floats], Floats]
    iteration: Floats
    pause: Pair

    @property
    def planned(self) -> Floats:
        """The plan's durations."""
        return np.array(self.run.seconds)[:, None]

    def seconds(self, durations: Floats) -> float:
        """The mean iteration with these durations."""
        return float(self.pace(self.replay.ends(durations)).mean())

    def account(self, chosen: Bools, base: float) -> tuple[float, Pair]:
        """Seconds that measured times of some entries add to an iteration, and those entries."""
        durations = np.where(chosen[:, None], self.measured, self.planned)
        work = Pair(
            float(self.planned[chosen].sum()), float(self.measured[chosen].mean(axis=1).sum())
        )
        iterations = self.run.plan.microbatches // self.run.iteration_microbatches
        return self.seconds(durations) - base, work.part(iterations)


def explain(plan: PipelinePlan, trace: Trace, iteration: Pair, update: Pair) -> Explanation | None:
    """The causes of the difference of an ``iteration``; None of a schedule that lacks actions.

    ``update`` are the optimizer's seconds, which lengthen iterations of a periodic plan.
    """
    if isinstance(plan.schedule, PeriodicSchedule):
        case = _of_runs(plan, plan.schedule, trace, iteration, update)
    elif is_complete(plan):
        case = measured_steps(plan, trace)
    else:
        return None
    base, least = case.seconds(case.planned), ROUNDING * iteration.predicted
    difference = _beyond(least, iteration.measured - iteration.predicted)
    causes = tuple(
        replace(one, seconds=_beyond(least, one.seconds))
        for one in _causes(case, base, iteration.predicted)
    )
    rest = _beyond(least, difference - sum(one.seconds for one in causes))
    sign = 1 if difference > 0 else -1
    largest = max(causes, key=lambda one: sign * one.seconds, default=None)
    calm = _without_waits(case) if case.waited.any() else None
    if difference == 0 or largest is None or sign * largest.seconds <= 0:
        return Explanation(causes, rest, None, calm)
    detailed = replace(
        largest,
        stages=_stages(case, base, KINDS.get(largest.name, ())),
        devices=_devices(case, base, largest.name),
    )
    causes = tuple(detailed if one is largest else one for one in causes)
    return Explanation(causes, rest, detailed, calm)


def _beyond(least: float, seconds: float) -> float:
    """Seconds, or 0 if the amount is within rounding."""
    return seconds if abs(seconds) > least else 0.0


def _without_waits(case: MeasuredRun) -> float:
    """The measured iteration minus the seconds that waits for a core add to its replay."""
    waits = case.seconds(case.measured + case.waited) - case.seconds(case.measured)
    return float(case.iteration.mean()) - waits


def _causes(case: MeasuredRun, base: float, predicted: float) -> tuple[TimeCause, ...]:
    every = case.measured + case.waited
    kinds = np.array([action.kind for action in case.run.actions])
    found = []
    for name, members in KINDS.items():
        chosen = np.isin(kinds, members)
        if chosen.any():
            found.append(TimeCause(name, *case.account(chosen, base)))
        elif name == "updates" and (case.pause.predicted or case.pause.measured):
            found.append(TimeCause(name, case.pause.measured - case.pause.predicted, case.pause))
    if case.waited.any():
        found.append(TimeCause(WAITING, case.seconds(case.planned + case.waited) - base))
    explained = case.seconds(every) + case.pause.measured
    found.append(TimeCause(BETWEEN, float(case.iteration.mean()) - explained))
    waits = base + case.pause.predicted - predicted
    if abs(waits) > 1e-9 * predicted:
        found.append(TimeCause(PLANNED_WAITS, waits))
    return tuple(found)


def _stages(
    case: MeasuredRun, base: float, kinds: tuple[ActionKind, ...]
) -> tuple[StageShare, ...]:
    """The shares of the stages that have actions of these kinds."""
    found = []
    places = np.array([_place(action) for action in case.run.actions])
    of_kind = np.array([action.kind in kinds for action in case.run.actions])
    for s in np.unique(places[of_kind]).tolist():
        found.append(StageShare(s, *case.account(of_kind & (places == s), base)))
    return tuple(found)


def _devices(case: MeasuredRun, base: float, name: str) -> tuple[DeviceShare, ...]:
    """The share of each device in a cause that is on devices: no transfers or all-reduces."""
    kinds = KINDS.get(name, ())
    if not set(kinds) <= set(ON_DEVICE):
        return ()
    of_kind = np.array([action.kind in kinds for action in case.run.actions])
    differing = np.where(of_kind[:, None], case.measured - case.planned, 0.0)
    added = {WAITING: case.waited, BETWEEN: case.gaps}.get(name, differing)
    names = np.array([one.device for one in case.run.plan.actions])
    return tuple(
        DeviceShare(device, case.seconds(case.planned + added * (names == device)[:, None]) - base)
        for device in np.unique(names).tolist()
    )


def _place(action: Action) -> int:
    """The stage; of a transfer the first of both."""
    return action.stage - (action.kind is SEND_B)


# Steps of a finite plan


def measured_steps(plan: PipelinePlan, trace: Trace) -> MeasuredRun:
    """The steps in the middle half, of a finite plan."""
    run = planned_run(plan, plan.microbatches)
    replay = Replay(run)
    steps = steps_in_the_middle(counted_steps(trace.steps))
    table = np.array([_times(plan, step) for step in steps])
    starts, ends, waited = table.transpose(2, 1, 0)
    on_device = np.array([action.kind in ON_DEVICE for action in run.actions])[:, None]
    ready = replay.ready(ends)
    began = np.where(on_device, starts, np.maximum(starts, ready))
    lasting = np.maximum(0.0, ends - began)
    waited = np.minimum(waited, lasting)
    if trace.backend == "nccl":
        lasting = _without_late_receivers(run, replay, began, ends)
    iterations = np.array([step.iteration_seconds for step in steps])
    return MeasuredRun(
        run=run,
        replay=replay,
        measured=lasting - waited,
        waited=waited,
        gaps=np.maximum(0.0, began - ready),
        pace=lambda ends: ends.max(axis=0),
        iteration=iterations,
        pause=Pair(0.0, 0.0),
    )


def _times(plan: PipelinePlan, step: TracedStep) -> list[tuple[float, float, float]]:
    """Start, finish and wait of each entry of the plan."""
    waits = step.waited_seconds or (0.0,) * len(step.actions)
    found = {
        (one.device, one.action): (one.start_seconds, one.finish_seconds, wait)
        for one, wait in zip(step.actions, waits, strict=True)
    }
    return [found[one.device, one.action] for one in plan.actions]


def _without_late_receivers(run: Run, replay: Replay, began: Floats, ends: Floats) -> Floats:
    """Seconds of entries, of a transfer only where its receiver had to wait for it.

    With NCCL the end of a message is known only when its receiver comes to it. Had that something
    else to do until then, the message is taken to have been as fast as planned.
    """
    lasting, planned = np.maximum(0.0, ends - began), np.array(run.seconds)[:, None]
    is_sent = np.array([action.kind in (SEND_F, SEND_B) for action in run.actions])
    waits = np.zeros_like(ends)
    free = replay.ready(np.where(is_sent[:, None], 0.0, ends))
    for sent, after in replay.pairs.tolist():
        if is_sent[sent] and not is_sent[after]:
            waits[sent] = np.maximum(waits[sent], ends[sent] - np.maximum(began[sent], free[after]))
    hidden = is_sent[:, None] & (waits < LATE * lasting)
    return np.where(hidden, np.minimum(lasting, planned), lasting)


# Runs of a periodic plan


def _of_runs(
    plan: PipelinePlan, schedule: PeriodicSchedule, trace: Trace, iteration: Pair, update: Pair
) -> MeasuredRun:
    """A run that reaches the steady state, in which each iteration's actions last equally long."""
    steady, m = steady_microbatches(schedule), plan.microbatches
    count = -(-(3 * steady + 1) // m) + 1
    run = planned_run(unroll_run(plan, count * m), m)
    medians = pair_entries(plan, trace)
    seconds = [
        medians[entry.device, _in_iteration(action, m)].measured
        for entry, action in zip(run.plan.actions, run.actions, strict=True)
    ]
    middle = slice(2 * steady, run.plan.microbatches - steady)
    backwards = either(run.entries[B], run.entries[W])[0][middle]
    periods = (len(backwards) - 1) // m * m

    def pace(ends: Floats) -> Floats:
        first, last = (ends[backwards[i]].max(axis=0) for i in (0, periods))
        found: Floats = (last - first) / periods * m
        return found

    measured = np.array(seconds)[:, None]
    return MeasuredRun(
        run=run,
        replay=Replay(run),
        measured=measured,
        waited=np.zeros_like(measured),
        gaps=np.zeros_like(measured),
        pace=pace,
        iteration=np.array([iteration.measured]),
        pause=update,
    )


def _in_iteration(action: Action, microbatches: int) -> str:
    """The action with the number of its microbatch in an iteration."""
    if action.microbatch is None:
        return str(action)
    return str(Action(action.stage, action.kind, action.microbatch % microbatches))
