"""Rules of periodic plans: the pattern can be repeated, and iterations do not conflict.

Where weights change after every microbatch, iterations are nothing but a count of microbatches:
the versions that are kept are a matter of memory (`peaks`).

All other rules are checked on the unrolled pattern without pauses. The rules across iterations are
checked with pauses: all-reduces run while the devices compute or pause.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from stagewright.formulations.checking.order import Violation
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
from stagewright.formulations.plans.timing import update_seconds
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.errors import InputError

_MOST_OPERATIONS = 5  # of a stage and a microbatch: F, I, W and two transfers
ENDS_BACKWARD = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)


def broken_pattern(plan: PipelinePlan, schedule: PeriodicSchedule) -> Iterator[Violation]:
    """The rules that must hold before a pattern can be unrolled."""
    if not plan.weight_rule.may_overlap:
        yield Violation(
            "weights",
            "weights",
            f"{plan.weights!r} does not allow iterations to overlap, a periodic plan needs "
            "'double-buffer', 'stash' or 'stash+vertical-sync'",
        )
    for s, stage in enumerate(plan.stages):
        if stage.turns > 1:
            yield Violation(
                "devices",
                f"stage {s}",
                "in a periodic plan every device of a stage runs every microbatch: use 'split'",
            )
    for i, one in enumerate(from_first(schedule).actions):
        yield from _broken_repetition(plan, one, schedule, f"schedule.actions[{i}]")


def _broken_repetition(
    plan: PipelinePlan, one: PeriodicAction, schedule: PeriodicSchedule, place: str
) -> Iterator[Violation]:
    """An operation can be repeated: it is known, ends before it repeats, and is not too late."""
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
            f"{one.action} takes {one.seconds:.9g} s and repeats every {most:.9g} s",
        )
    if plan.weight_rule.updates_every_round:
        yield from _late(one, len(plan.stages), place)
        return
    # A microbatch ends before its weights are overwritten, and an all-reduce after an iteration.
    latest = plan.microbatches * (2 if operation.kind is REDUCE else 1) + 2
    if one.shift > latest:
        yield Violation(
            "versions",
            place,
            f"{one.action} runs {one.shift} periods after its microbatch began; with two "
            f"versions of the weights and {plan.microbatches} microbatches in an iteration "
            f"at most {latest} are possible",
        )


def _late(one: PeriodicAction, stages: int, place: str) -> Iterator[Violation]:
    """No operation waits for more than a period: any later it could run a period earlier."""
    latest = 2 * _MOST_OPERATIONS * stages
    if one.shift > latest:
        yield Violation(
            "versions",
            place,
            f"{one.action} runs {one.shift} periods after its microbatch began; {latest} are "
            f"enough for {stages} stages",
        )


def broken_iterations(
    problem: PipelineProblem, plan: PipelinePlan, schedule: PeriodicSchedule, tolerance: float
) -> Iterator[Violation]:
    """Rules on pauses, all-reduces, and the two versions of the weights.

    Times are compared with ``tolerance``, in seconds.
    """
    if plan.weight_rule.updates_every_round:
        yield from _any_pause(schedule)
        return
    yield from _short_pause(problem, plan, schedule, tolerance)
    yield from _overlapping_reductions(plan, schedule, tolerance)
    yield from _overwritten(plan, schedule, tolerance)


def _any_pause(schedule: PeriodicSchedule) -> Iterator[Violation]:
    """Where updates are parts of the backwards, there is no pause."""
    if schedule.pause_seconds > 0:
        yield Violation(
            "pause",
            "schedule",
            f"pause_seconds is {schedule.pause_seconds:.9g}, but weights that change after every "
            "microbatch are updated in the backwards: it must be 0",
        )


def _short_pause(
    problem: PipelineProblem, plan: PipelinePlan, schedule: PeriodicSchedule, tolerance: float
) -> Iterator[Violation]:
    """The pause is long enough for all updates of a device, one after another."""
    updates: defaultdict[str, float] = defaultdict(float)
    for stage in plan.stages:
        for name in stage.devices:
            updates[name] += update_seconds(problem, stage)
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
    """The all-reduces of enough iterations for all to appear, and of one more."""
    m = plan.microbatches
    iterations = max((one.shift // m for one in reductions), default=0) + 3
    run = [
        done_for(schedule, m, one, (i + 1) * m - 1) for one in reductions for i in range(iterations)
    ]
    # A zero-length all-reduce overlaps with nothing.
    lasting = [one for one in run if one.finish_seconds > one.start_seconds]
    return sorted(lasting, key=lambda one: one.start_seconds)


def _overwritten(
    plan: PipelinePlan, schedule: PeriodicSchedule, tolerance: float
) -> Iterator[Violation]:
    """Two versions of the weights are enough.

    Iteration i computes on version i - 1; its update, after the all-reduce of its gradients, makes
    version i + 1, which iteration i + 2 begins with. Without a pause the gradients must be ready
    when the stage's first forward of iteration i + 2 begins; with pauses, when the last pause
    before that forward begins, which contains the update.
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
