"""Periodic plans: a pattern as the actions of the first microbatches.

MadPipe section 3: an operation with start t and shift h runs for microbatch k at (k + h) T + t.
With pauses, period n starts later by one pause for every m periods before it.

Unroll a periodic plan: its pattern for many microbatches, with warm-up and drain.

With H the largest index shift, the periods 0 to H - 1 of a run of N microbatches are its warm-up,
in which the pipeline fills; in the periods H to N - 1 every operation runs; the rest drains.
Pauses separate the periods of one iteration from those of the next.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stagewright.formulations.plans.actions import ActionKind, parse_operation
from stagewright.formulations.plans.plan import (
    PeriodicAction,
    PeriodicSchedule,
    PipelinePlan,
    Schedule,
    ScheduledAction,
)
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats


def warm_up_periods(schedule: PeriodicSchedule) -> int:
    """H: from this period on every operation except all-reduces runs in every period."""
    return max((one.shift for one in schedule.actions if not _is_reduce(one.action)), default=0)


def unroll_run(plan: PipelinePlan, microbatches: int) -> PipelinePlan:
    """Unroll a periodic ``plan`` into the finite plan of this many microbatches.

    It ends with an iteration: all-reduces follow the last microbatch, and every microbatch that is
    a multiple of an iteration's microbatches before it. Times that differ only by rounding are made
    equal, so that an action starts exactly when the one directly before it ends.
    """
    schedule = plan.schedule
    assert isinstance(schedule, PeriodicSchedule)
    actions = [
        *unrolled(plan, microbatches).actions,
        *_earlier_reductions(plan, schedule, microbatches),
    ]
    times = np.array([(one.start_seconds, one.finish_seconds) for one in actions]).reshape(-1, 2)
    times = _without_rounding(times, RELATIVE_TOLERANCE * schedule.period_seconds)
    snapped = [
        replace(one, start_seconds=start, finish_seconds=finish)
        for one, (start, finish) in zip(actions, times.tolist(), strict=True)
    ]
    return _scheduled(plan, microbatches, snapped)


def finite_run(plan: PipelinePlan, iterations: int) -> PipelinePlan:
    """The first iterations of a periodic plan; a finite plan is returned as it is."""
    if not plan.is_periodic:
        return plan
    return unroll_run(plan, iterations * plan.microbatches)


def _earlier_reductions(
    plan: PipelinePlan, schedule: PeriodicSchedule, microbatches: int
) -> Iterator[ScheduledAction]:
    """The all-reduces of all iterations but the last, which :func:`unrolled` has."""
    lasts = range(microbatches - 1 - plan.microbatches, -1, -plan.microbatches)
    for one in schedule.actions:
        if _is_reduce(one.action):
            for last in lasts:
                yield done_for(schedule, plan.microbatches, one, last)


def _is_reduce(text: str) -> bool:
    return parse_operation(text).kind is ActionKind.REDUCE


def _without_rounding(times: Floats, tolerance: float) -> Floats:
    """``times``, in which values that differ by at most ``tolerance`` are set equal."""
    instants, place = np.unique(times, return_inverse=True)
    is_first = np.diff(instants, prepend=-np.inf) > tolerance
    earliest: Floats = instants[is_first][np.cumsum(is_first) - 1]
    return earliest[place].reshape(times.shape)


def _first_start(one: PeriodicAction, period: float) -> float:
    """Start of the operation for microbatch 0, in seconds from the start of the first period."""
    return one.shift * period + one.start_seconds


def from_first(schedule: PeriodicSchedule) -> PeriodicSchedule:
    """The same pattern with shifts relative to the smallest."""
    least = min((one.shift for one in schedule.actions), default=0)
    if least == 0:
        return schedule
    actions = tuple(replace(one, shift=one.shift - least) for one in schedule.actions)
    return replace(schedule, actions=actions)


def iteration_seconds(schedule: PeriodicSchedule, microbatches: int) -> float:
    """Seconds of an iteration: a period per microbatch, plus the pause."""
    return microbatches * schedule.period_seconds + schedule.pause_seconds


def period_begin(schedule: PeriodicSchedule, microbatches: int, period: int) -> float:
    """Start of a period in seconds, by its number, with ``microbatches`` per iteration."""
    pauses = period // microbatches
    return period * schedule.period_seconds + pauses * schedule.pause_seconds


def forward_shifts(schedule: PeriodicSchedule) -> dict[int, int]:
    """The index shift of every stage's forward."""
    operations = [(parse_operation(one.action), one.shift) for one in schedule.actions]
    return {one.stage: shift for one, shift in operations if one.kind is ActionKind.FORWARD}


def without_pause(schedule: PeriodicSchedule) -> PeriodicSchedule:
    """The same pattern without its pause."""
    return replace(schedule, pause_seconds=0.0)


def latency(schedule: PeriodicSchedule) -> float:
    """Seconds until the last action of microbatch 0 has ended, without pauses."""
    period = schedule.period_seconds
    return max((_first_start(one, period) + one.seconds for one in schedule.actions), default=0.0)


def steady_microbatches(schedule: PeriodicSchedule) -> int:
    """How many microbatches it takes to reach one full steady-state period."""
    return math.ceil(latency(schedule) / schedule.period_seconds) + 2


def unrolled(plan: PipelinePlan, microbatches: int) -> PipelinePlan:
    """Unroll a periodic ``plan`` into the finite plan of this many microbatches.

    It has no certificate and no predictions. All-reduces appear once, after the last microbatch;
    updates do not appear, but the pauses for them do.
    """
    schedule = plan.schedule
    assert isinstance(schedule, PeriodicSchedule)
    actions = [
        done_for(schedule, plan.microbatches, one, m)
        for one in schedule.actions
        for m in _microbatches(one, microbatches)
    ]
    return _scheduled(plan, microbatches, actions)


def _scheduled(
    plan: PipelinePlan, microbatches: int, actions: list[ScheduledAction]
) -> PipelinePlan:
    """The plan of ``microbatches`` with these actions, about which nothing is claimed."""
    actions.sort(key=lambda one: (one.start_seconds, one.finish_seconds, one.action))
    schedule = Schedule(tuple(actions))
    return replace(
        plan, microbatches=microbatches, schedule=schedule, predicted=None, certificate=None
    )


def _microbatches(one: PeriodicAction, microbatches: int) -> range:
    is_reduce = parse_operation(one.action).kind is ActionKind.REDUCE
    return range(microbatches - 1 if is_reduce else 0, microbatches)


def done_for(
    schedule: PeriodicSchedule, microbatches: int, one: PeriodicAction, microbatch: int
) -> ScheduledAction:
    """The action of a microbatch in a run, with ``microbatches`` per iteration."""
    start = period_begin(schedule, microbatches, microbatch + one.shift) + one.start_seconds
    action = parse_operation(one.action).of(microbatch)
    return ScheduledAction(
        one.device, str(action), start, start + one.seconds, one.sources, one.targets, one.bytes
    )
