"""Rules of periodic plans: what can be repeated, and what ties an iteration to the next ones.

All other rules are read on the pattern without its pauses, which only part what is done. Those on
iterations are read in real time: gradients are summed up while the devices compute, or pause.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from stagewright.formulations.checking.violations import Violation
from stagewright.formulations.plans.actions import REDUCE, ActionKind, parse_operation
from stagewright.formulations.plans.periodic import (
    done_for,
    from_first,
    iteration_seconds,
    period_begin,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import (
    PeriodicAction,
    PeriodicSchedule,
    PipelinePlan,
    ScheduledAction,
)
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.errors import InputError

ENDS_BACKWARD = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)


def broken_pattern(plan: PipelinePlan, schedule: PeriodicSchedule) -> Iterator[Violation]:
    """What a periodic plan needs before its pattern can be unrolled."""
    if not plan.weight_rule.may_overlap:
        yield Violation(
            "weights",
            "weights",
            f"{plan.weights!r} ends with the iteration or updates within it, a periodic plan needs "
            "'double-buffer'",
        )
    for s, stage in enumerate(plan.stages):
        if stage.turns > 1:
            yield Violation(
                "devices",
                f"stage {s}",
                "in a periodic plan all devices of a stage do every microbatch: use 'split'",
            )
    for i, one in enumerate(from_first(schedule).actions):
        yield from _broken_repetition(plan, one, schedule, f"schedule.actions[{i}]")


def _broken_repetition(
    plan: PipelinePlan, one: PeriodicAction, schedule: PeriodicSchedule, place: str
) -> Iterator[Violation]:
    """An operation that can be repeated: known, done before it is due again, and not too late."""
    try:
        operation = parse_operation(one.action)
    except InputError as error:
        yield Violation("unexpected", place, str(error))
        return
    most = schedule.period_seconds
    if operation.kind is REDUCE:
        most = iteration_seconds(schedule, plan.microbatches)
    if one.seconds > most * (1 + RELATIVE_TOLERANCE):
        yield Violation(
            "overlap",
            place,
            f"{one.action} takes {one.seconds:.9g} s and is due again after {most:.9g} s",
        )
    # A microbatch ends before its weights are overwritten, and an all-reduce after an iteration.
    latest = plan.microbatches * (2 if operation.kind is REDUCE else 1) + 2
    if one.shift > latest:
        yield Violation(
            "versions",
            place,
            f"{one.action} is done {one.shift} periods after its microbatch began; with two "
            f"versions of the weights and {plan.microbatches} microbatches in an iteration "
            f"{latest} is the most",
        )


def broken_iterations(
    problem: PipelineProblem, plan: PipelinePlan, schedule: PeriodicSchedule, tolerance: float
) -> Iterator[Violation]:
    """Pauses, all-reduces in turn, and two versions of the weights.

    Times are compared with ``tolerance``, in seconds.
    """
    yield from _short_pause(problem, plan, schedule, tolerance)
    yield from _overlapping_reductions(plan, schedule, tolerance)
    yield from _overwritten(plan, schedule, tolerance)


def _short_pause(
    problem: PipelineProblem, plan: PipelinePlan, schedule: PeriodicSchedule, tolerance: float
) -> Iterator[Violation]:
    """The pause has time for all updates of a device, one after another."""
    updates: defaultdict[str, float] = defaultdict(float)
    for stage in plan.stages:
        devices = [problem.cluster.index[name] for name in stage.devices]
        for name in stage.devices:
            updates[name] += problem.update_seconds(*stage.layers, devices)
    name = max(updates, key=updates.__getitem__)
    if updates[name] > schedule.pause_seconds + tolerance:
        yield Violation(
            "pause",
            f"device {name}",
            f"its updates take {updates[name]:.9g} s, pause_seconds is "
            f"{schedule.pause_seconds:.9g}",
        )


def _overlapping_reductions(
    plan: PipelinePlan, schedule: PeriodicSchedule, tolerance: float
) -> Iterator[Violation]:
    """A device takes part in one all-reduce at a time, those of other iterations included."""
    reductions = [one for one in schedule.actions if _kind(one) is REDUCE]
    taking: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in dict.fromkeys(name for stage in plan.stages for name in stage.devices):
        taken = tuple(i for i, one in enumerate(reductions) if name in (one.sources or ()))
        taking[taken].append(name)
    for taken, names in taking.items():
        run = _unrolled(plan, schedule, [reductions[i] for i in taken])
        for one, other in pairwise(run):
            if other.start_seconds < one.finish_seconds - tolerance:
                yield Violation(
                    "overlap",
                    f"all-reduces on device {names[0]}",
                    f"{other.action} starts at {other.start_seconds:.9g} s, the device takes part "
                    f"in {one.action} until {one.finish_seconds:.9g} s",
                )
                break


def _unrolled(
    plan: PipelinePlan, schedule: PeriodicSchedule, reductions: list[PeriodicAction]
) -> list[ScheduledAction]:
    """The all-reduces of as many iterations as it takes until all are there, and one more."""
    m = plan.microbatches
    iterations = max((one.shift // m for one in reductions), default=0) + 3
    run = [
        done_for(schedule, m, one, (i + 1) * m - 1) for one in reductions for i in range(iterations)
    ]
    # What takes no time may be done between any others.
    lasting = [one for one in run if one.finish_seconds > one.start_seconds]
    return sorted(lasting, key=lambda one: one.start_seconds)


def _overwritten(
    plan: PipelinePlan, schedule: PeriodicSchedule, tolerance: float
) -> Iterator[Violation]:
    """Two versions of the weights are enough.

    Iteration i computes on version i - 1; its update, which needs its gradients summed up, makes
    version i + 1, which iteration i + 2 begins with. Without a pause the gradients must be ready
    as the stage's first forward of iteration i + 2 begins; with one, as the last pause before that
    forward begins, in which the update is done.
    """
    m, period = plan.microbatches, schedule.period_seconds
    entries: defaultdict[int, list[PeriodicAction]] = defaultdict(list)
    for one in schedule.actions:
        entries[parse_operation(one.action).stage].append(one)
    for s, own in sorted(entries.items()):
        ready = max(
            done_for(schedule, m, one, m - 1).finish_seconds
            for one in own
            if _kind(one) in (*ENDS_BACKWARD, REDUCE)
        )
        forward = next(one for one in own if _kind(one) is ActionKind.FORWARD)
        needed = done_for(schedule, m, forward, 2 * m).start_seconds
        if schedule.pause_seconds > 0:
            pause = (2 * m + forward.shift) // m
            needed = period_begin(schedule, m, pause * m) - schedule.pause_seconds
        if ready > needed + tolerance:
            yield Violation(
                "versions",
                f"stage {s}",
                f"its gradients are ready {ready - needed:.9g} s after iterations of {m} "
                f"microbatches begin to need the update: plan more microbatches, or a period "
                f"longer than {period:.9g} s",
            )


def _kind(one: PeriodicAction) -> ActionKind:
    return parse_operation(one.action).kind
