"""1F1B*: the periodic pattern that keeps the fewest microbatches (MadPipe section 4.1).

Stages and the transfers between them are the items of a chain, each with a forward and a backward
time. Items are put into groups from the last to the first, as many per group as fit in the period.
An item of the g-th group keeps g microbatches in flight. By Proposition 1 no pattern of the same
period keeps fewer, even if every item has its own device. So 1F1B* is an optimal pattern where
every stage has its own device, and a lower bound otherwise.
"""

import math
from collections.abc import Callable
from itertools import accumulate

from stagewright.formulations.patterns.pattern import Pattern, PatternProblem
from stagewright.formulations.plans.actions import ActionKind

PATTERN_LOAD = "load of devices and links"
PATTERN_MEMORY = "memory that 1F1B* needs"

MARGIN = 1e-12  # relative; sums of the same times in another order differ by rounding


def groups(problem: PatternProblem, period: float) -> tuple[int, ...]:
    """The group of every stage, shape (N,): how many microbatches it keeps in flight."""
    return tuple(group for group, _ in _items(problem, period)[::2])


def one_f_one_b_star(problem: PatternProblem, period: float) -> Pattern:
    """The pattern of 1F1B*: forwards in sequence, the backwards of each group in one period.

    It is valid if every stage has its own device and ``period`` is at least the time of every item.
    Memory is not checked; see `least_period`.
    """
    items = _items(problem, period)
    jobs, item_of = problem.jobs, {}
    forward, starts = 0.0, []
    for i, _ in enumerate(items):
        item_of[i] = forward
        forward += _seconds(problem, i)[0]
    backward: dict[int, float] = {}
    for i in reversed(range(len(items))):
        group = items[i][0]
        if i == len(items) - 1 or items[i + 1][0] < group:
            # The backward of the group's last item follows its forward, group - 1 periods later.
            backward[i] = item_of[i] + _seconds(problem, i)[0] + (group - 1) * period
        else:
            backward[i] = backward[i + 1] + _seconds(problem, i + 1)[1]
    for job in jobs:
        kind, s = job.operation.kind, job.operation.stage
        if kind in (ActionKind.FORWARD, ActionKind.SEND_FORWARD):
            starts.append(item_of[2 * s + (kind is ActionKind.SEND_FORWARD)])
        else:
            starts.append(backward[2 * s - (kind is ActionKind.SEND_BACKWARD)])
    return Pattern(period, tuple(starts))


def pattern_load_bound(problem: PatternProblem) -> float:
    """The largest load of a device or link, or of a device's all-reduces per period.

    All-reduces may overlap with the pause.
    """
    loads = [sum(problem.jobs[i].seconds for i in members) for members in problem.shared]
    reduced = max(sum(problem.reduce[s] for s in stages) for stages in problem.reducing)
    reduced -= problem.pause_seconds
    return max(*loads, problem.least_seconds, reduced / problem.microbatches)


def iteration_bound(problem: PatternProblem) -> float:
    """A lower bound on the iteration: m periods of `period_bound`, plus the pause."""
    return problem.iteration_seconds(period_bound(problem))


def allows(problem: PatternProblem, period: float) -> bool:
    """Whether loads and memory allow a pattern of ``period``, i.e. ``period_bound`` <= period."""
    return _least_load(problem) <= period and _suffices(problem, period)


def period_bound(problem: PatternProblem) -> float:
    """A lower bound on the period, from loads and from the memory required by Proposition 1.

    At some instant a stage keeps all g microbatches of 1F1B*, at every instant at least g - 1, and
    always at least as many as a later stage. So a device with several stages keeps at least g - 1
    of each, and at some instant one more of a stage and of all earlier stages of its group. MadPipe
    (4.2.1) counts g - 1 for all of them. Infinite if no period is feasible. 1F1B* attains the bound
    if every stage has its own device and there are no all-reduces.
    """
    return _least(problem, _least_load(problem), lambda period: True, [])


def _least_load(problem: PatternProblem) -> float:
    """The largest load, or the time of a microbatch's round trip divided by m + 1 periods.

    The all-reduces of all earlier stages of a device also run between the backward of a stage and
    the next use of its weights: their backwards end later, and their weights are needed earlier.
    One pause may lie in that interval.
    """
    seconds = [sum(_seconds(problem, i)) for i in reversed(range(_count(problem)))]
    trips = list(accumulate(seconds))[::-1][::2]
    through = list(trips)
    for stages in problem.reducing:
        for s, reduced in zip(stages, accumulate(problem.reduce[s] for s in stages), strict=True):
            through[s] += max(0.0, reduced - problem.pause_seconds)
    return max(pattern_load_bound(problem), max(through) / problem.most_periods)


def least_period(problem: PatternProblem) -> float:
    """The least period at which 1F1B* fits in memory; infinite if there is none.

    The result is exact: groups, and with them memory, change only at sums of consecutive items, and
    an all-reduce fits above a quotient of such a sum.

    Every stage must have its own device.
    """
    low = max(pattern_load_bound(problem), max(problem.reduce) / problem.microbatches)
    if _suffices(problem, low) and _reduces_in_time(problem, low):
        return low  # without the breakpoints, which are many
    waits = _waits(problem)
    extra = [
        (waits[s] + total + problem.reduce[s]) / periods
        for s, seconds in enumerate(problem.reduce)
        if seconds > 0
        for total in accumulate(sum(_seconds(problem, i)) for i in range(2 * s, _count(problem)))
        for periods in range(1, problem.microbatches + 2)
    ]
    return _least(problem, low, lambda t: _reduces_in_time(problem, t), extra)


def _least(
    problem: PatternProblem, low: float, fits: Callable[[float], bool], extra: list[float]
) -> float:
    """The least breakpoint of at least ``low`` at which memory suffices and ``fits`` holds."""
    seconds = [sum(_seconds(problem, i)) for i in range(_count(problem))]
    sums = {total for first in range(len(seconds)) for total in accumulate(seconds[first:])}
    points = sorted({low, *(point for point in (*sums, *extra) if point > low)})

    def suffices(period: float) -> bool:
        return _suffices(problem, period) and fits(period)

    if not suffices(points[-1]):
        return math.inf
    below, least = -1, len(points) - 1
    while least - below > 1:
        middle = (below + least) // 2
        if suffices(points[middle]):
            least = middle
        else:
            below = middle
    return points[least]


def _suffices(problem: PatternProblem, period: float) -> bool:
    """Whether memory, and the versions of the weights, suffice at ``period``."""
    in_flight = groups(problem, period)
    return max(in_flight) <= problem.most_periods and all(
        _needed(problem, in_flight, device) <= room
        for device, room in enumerate(problem.room_bytes)
    )


def _needed(problem: PatternProblem, in_flight: tuple[int, ...], device: int) -> float:
    """A lower bound on the peak bytes of a device's stages."""
    stages = problem.stages_on(device)
    kept = [(in_flight[s], problem.kept[s]) for s in stages]
    always = sum((group - 1) * one.saved_bytes for group, one in kept)
    always += sum(problem.old_versions(s, in_flight) for s in stages)
    most = before = 0.0
    for s, (group, one) in enumerate(kept):
        # Earlier stages of this group keep all of its microbatches at that instant.
        before = before if s > 0 and kept[s - 1][0] == group else 0.0
        most = max(most, before + one.saved_bytes + one.working_bytes)
        before += one.saved_bytes
    return always + most


def _reduces_in_time(problem: PatternProblem, period: float) -> bool:
    """Whether every all-reduce of 1F1B* ends before the next version is needed."""
    limit = problem.most_periods * period * (1 + MARGIN)
    items = _items(problem, period)[::2]
    return all(
        wait + (group - 1) * period + rest + reduce <= limit
        for wait, (group, rest), reduce in zip(_waits(problem), items, problem.reduce, strict=True)
    )


def _waits(problem: PatternProblem) -> list[float]:
    """Per stage the time from the latest end of its all-reduce to the start of its forward.

    With a pause, all-reduces must end before the first stage starts the iteration.
    """
    stages = len(problem.forward)
    if problem.pause_seconds == 0:
        return [0.0] * stages
    forwards = [_seconds(problem, i)[0] for i in range(_count(problem))]
    return [sum(forwards[: 2 * s]) for s in range(stages)]


def _items(problem: PatternProblem, period: float) -> list[tuple[int, float]]:
    """The group of each item, and the seconds of that group from this item on."""
    found: list[tuple[int, float]] = []
    group, taken = 1, 0.0
    for i in reversed(range(_count(problem))):
        own = sum(_seconds(problem, i))
        if taken + own > period * (1 + MARGIN):
            group, taken = group + 1, 0.0
        taken += own
        found.append((group, taken))
    return found[::-1]


def _count(problem: PatternProblem) -> int:
    return 2 * len(problem.forward) - 1


def _seconds(problem: PatternProblem, item: int) -> tuple[float, float]:
    """Forward and backward time of an item: stage i / 2, or the transfer after it."""
    s = item // 2
    if item % 2:
        return problem.there[s], problem.back[s]
    return problem.forward[s], problem.backward[s]
