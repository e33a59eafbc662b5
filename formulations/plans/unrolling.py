"""Unroll a periodic plan: its pattern for many microbatches, with warm-up and drain.

With H the largest index shift, the periods 0 to H - 1 of a run of N microbatches are its warm-up,
in which the pipeline fills; in the periods H to N - 1 every operation runs; the rest drains.
Pauses separate the periods of one iteration from those of the next.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stagewright.formulations.plans.actions import ActionKind, parse_operation
from stagewright.formulations.plans.periodic import done_for, unrolled
from stagewright.formulations.plans.plan import (
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
    snapped.sort(key=lambda one: (one.start_seconds, one.finish_seconds, one.action))
    return replace(
        plan,
        microbatches=microbatches,
        schedule=Schedule(tuple(snapped)),
        predicted=None,
        certificate=None,
    )


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
