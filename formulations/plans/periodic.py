"""Periodic plans: a pattern as the actions of the first microbatches.

MadPipe section 3: an operation with start t and shift h runs for microbatch k at (k + h) T + t.
With pauses, period n starts later by one pause for every m periods before it.
"""

import math
from dataclasses import replace

from stagewright.formulations.plans.actions import ActionKind, parse_operation
from stagewright.formulations.plans.plan import (
    PeriodicAction,
    PeriodicSchedule,
    PipelinePlan,
    Schedule,
    ScheduledAction,
)


def first_start(one: PeriodicAction, period: float) -> float:
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
    return max((first_start(one, period) + one.seconds for one in schedule.actions), default=0.0)


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
    actions.sort(key=lambda one: (one.start_seconds, one.finish_seconds, one.action))
    return replace(
        plan,
        microbatches=microbatches,
        schedule=Schedule(tuple(actions)),
        predicted=None,
        certificate=None,
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
