"""Lower bounds on every finite schedule of given stages, which may share devices.

The *head* of a task is the least time before it, its *tail* the least time after it. Longest paths
give both; then every device and channel is one machine. docs/certificates.md has the proofs.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from stagewright.formulations.pipelines.blocks import numbering
from stagewright.formulations.pipelines.bounds.device_tasks import Tasks, tasks_of, tasks_of_stages
from stagewright.formulations.pipelines.bounds.stages import one_machine_bound
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.structure import Endings, Work
from stagewright.graphs.documents.arrays import Bools, Floats, Ints

EDGE_FINDING = "edge finding on devices and channels"

ROUNDS = 50
SLACK = 1e-9  # relative; more than the rounding of the sums


class Window(NamedTuple):
    """The heads and tails of all tasks, in seconds."""

    heads: Floats
    tails: Floats


def verified_bound(
    problem: PipelineProblem, stages: Sequence[Stage], parts: bool, seconds: float
) -> float:
    """The bound on ``stages``, at least ``seconds`` if no schedule is as short as that."""
    tasks = tasks_of_stages(problem, stages, parts)
    window = window_of(tasks)
    found = machine_bound(tasks, window)
    if found < seconds and is_refuted(tasks, seconds * (1 - SLACK), window):
        return seconds
    return found


def quick_device_bound(work: Work, endings: Endings) -> float:
    """A bound on every schedule of a structure, from longest paths alone."""
    tasks = tasks_of(work, endings)
    window = _nothing(tasks)
    _follow_paths(tasks, window)
    return machine_bound(tasks, window)


def machine_bound(tasks: Tasks, window: Window) -> float:
    """The longest path and the longest of Jackson's preemptive schedules of all machines."""
    heads, tails = window
    jackson = [
        one_machine_bound(heads[own], tasks.seconds[own], tails[own]) for own in tasks.machines
    ]
    return max([float((heads + tasks.seconds + tails).max()), *jackson])


def window_of(tasks: Tasks) -> Window:
    """Heads and tails in every schedule."""
    found = _narrowed(
        tasks, inf, Window(np.zeros(len(tasks.seconds)), np.zeros(len(tasks.seconds)))
    )
    assert found is not None  # there is a schedule of some length
    return found


def _nothing(tasks: Tasks) -> Window:
    return Window(np.zeros(len(tasks.seconds)), np.zeros(len(tasks.seconds)))


def is_refuted(tasks: Tasks, target: float, window: Window) -> bool:
    """Whether edge finding shows that no schedule takes ``target`` seconds or less.

    ``window`` holds for every schedule.
    """
    return _narrowed(tasks, target, window) is None


def _narrowed(tasks: Tasks, target: float, known: Window) -> Window | None:
    """Heads and tails in every schedule of at most ``target`` seconds; None if there is none."""
    found = Window(known.heads.copy(), known.tails.copy())
    slack = SLACK * (target if target < inf else float(tasks.seconds.sum()))
    for _ in range(ROUNDS):
        _follow_paths(tasks, found)
        if (found.heads + tasks.seconds + found.tails).max() > target + slack:
            return None
        changed = False
        for own, follows in tasks.busy:
            raised = _look_at_pairs(tasks, found, own, follows, target, slack)
            if raised is None:
                return None
            changed = changed or raised
        if not changed:
            break
    return found


def _look_at_pairs(
    tasks: Tasks, window: Window, own: Ints, follows: Bools, target: float, slack: float
) -> bool | None:
    """Raise the heads and tails of a machine's tasks; None if they do not fit in the target."""
    changed, seconds = False, tasks.seconds[own]
    # The tails are the heads of the problem reversed in time.
    for one, other, after in ((*window, follows), (*window[::-1], follows.T)):
        raised = _raised(one[own], seconds, target - other[own], after, slack)
        if raised is None:
            return None
        changed = changed or bool((raised > one[own] + slack).any())
        one[own] = raised
    return changed


def _raised(
    heads: Floats, seconds: Floats, ends: Floats, follows: Bools, slack: float
) -> Floats | None:
    """Raised heads of a machine's tasks, which must end by ``ends``; None if they cannot.

    Edge finding (Carlier and Pinson 1989), then the tasks that come before another one.
    """
    order = np.argsort(-heads, kind="stable")
    head, work, end = heads[order], seconds[order], ends[order]
    limit = end[:, None]
    # Of the tasks that end by end[k], those with a head of at least head[a] are the set [k, a].
    inside = end <= limit
    load = np.cumsum(np.where(inside, work, 0.0), axis=1)
    done = np.where(inside, head + load, -inf)  # all of the set are done no earlier
    if (done > limit + slack).any():
        return None
    early, late = _largest_so_far(done), _largest_so_far(done[:, ::-1])[:, ::-1]
    is_last = ~inside & (late + work > limit + slack)
    is_not_first = ~inside & (load > 0) & (head + load + work > limit + slack)
    found = np.where(is_last, np.maximum(early, late), np.where(is_not_first, early, -inf))
    is_after = follows[np.ix_(order, order)] | ((head + work)[:, None] > end - work + slack)
    np.fill_diagonal(is_after, False)
    load = np.cumsum(np.where(is_after, work, 0.0), axis=1)
    before = np.where(is_after, head + load, -inf)
    raised = np.empty_like(heads)
    raised[order] = np.maximum(head, np.maximum(found.max(axis=0), before.max(axis=1)))
    return raised


def _largest_so_far(values: Floats) -> Floats:
    return np.asarray(np.maximum.accumulate(values, axis=1))


def _follow_paths(tasks: Tasks, window: Window) -> None:
    """Raise heads and tails to the longest paths."""
    _raise_heads(tasks, window.heads)
    _raise_tails(tasks, window.tails)


def _raise_heads(tasks: Tasks, heads: Floats) -> None:
    start, seconds = tasks.rows(heads), tasks.rows(tasks.seconds)
    forward, backward, weight = numbering(tasks.stages)
    way, turns = slice(0, weight[0]), tasks.turns
    before = np.cumsum(seconds[way], axis=0) - seconds[way]
    for m in range(0, tasks.microbatches, turns):
        now = slice(m, min(m + turns, tasks.microbatches))
        if m:
            then = slice(m - turns, now.stop - turns)
            start[:, now] = np.maximum(start[:, now], start[:, then] + seconds[:, then])
        first = np.arange(m, now.stop) - tasks.limits[:, now] * turns  # it leaves before this one
        s, i = np.nonzero(first >= 0)
        left = (start + seconds)[weight[s], first[s, i]]
        start[forward[s], m + i] = np.maximum(start[forward[s], m + i], left)
        start[way, now] = before[:, now] + np.maximum.accumulate(
            start[way, now] - before[:, now], axis=0
        )
        start[weight, now] = np.maximum(start[weight, now], (start + seconds)[backward, now])
    reduce, update = tasks.endings(heads)
    np.maximum(reduce, (start + seconds)[weight].max(axis=1), out=reduce)
    np.maximum(update, reduce + tasks.endings(tasks.seconds)[0], out=update)


def _raise_tails(tasks: Tasks, tails: Floats) -> None:
    rest, seconds = tasks.rows(tails), tasks.rows(tasks.seconds)
    forward, backward, weight = numbering(tasks.stages)
    way, turns, count = slice(0, weight[0]), tasks.turns, tasks.microbatches
    reduce, update = tasks.endings(tails)
    np.maximum(reduce, update + tasks.endings(tasks.seconds)[1], out=reduce)
    closing = reduce + tasks.endings(tasks.seconds)[0]
    rest[weight] = np.maximum(rest[weight], closing[:, None])
    past = np.cumsum(seconds[way][::-1], axis=0)[::-1] - seconds[way]
    for stop in range(count, 0, -turns):
        now = slice(max(0, stop - turns), stop)
        if stop < count:
            then = slice(now.start + turns, stop + turns)
            rest[:, now] = np.maximum(rest[:, now], rest[:, then] + seconds[:, then])
        last = np.arange(now.start, stop) + tasks.limits[:, now] * turns  # it waits for this one
        s, i = np.nonzero(last < count)
        waits = (rest + seconds)[forward[s], last[s, i]]
        rest[weight[s], now.start + i] = np.maximum(rest[weight[s], now.start + i], waits)
        rest[backward, now] = np.maximum(rest[backward, now], (rest + seconds)[weight, now])
        rest[way, now] = (
            past[:, now]
            + np.maximum.accumulate((rest[way, now] - past[:, now])[::-1], axis=0)[::-1]
        )
