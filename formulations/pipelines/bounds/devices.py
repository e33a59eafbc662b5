"""Lower bounds on every finite schedule of given stages, which may share devices.

The *head* of a task is the least time before it, its *tail* the least time after it. Longest paths
give both; then every device and channel is one machine. docs/certificates.md has the proofs.

The tasks of given stages and the machines that run them, for bounds on their schedules.

Stages may share devices, take turns, recompute or offload, and split their backwards. A task is one
computation or transfer of a microbatch, an all-reduce or an optimizer step. A machine is a device,
a channel, or the all-reduces of a device: it runs one task at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, lcm
from typing import NamedTuple

import numpy as np

from stagewright.formulations.pipelines.blocks import numbering
from stagewright.formulations.pipelines.bounds.stages import one_machine_bound
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.structure import Endings, Structure, Work, work_of_stages
from stagewright.formulations.plans.timing import (
    lane_seconds,
    positions,
    reduce_seconds,
    update_seconds,
)
from stagewright.graphs.documents.arrays import Bools, Floats, Ints

ROUNDING = 1e-9  # relative; the checker may count bytes in another order
BUSY = 0.2  # of the largest load of a machine
PAIRS = 300_000


@dataclass(frozen=True, eq=False)
class Tasks:
    """The tasks of S stages and M microbatches: rows, then all-reduces, then optimizer steps.

    The rows are those of :func:`numbering`, M tasks each: the way of a microbatch, and then the
    weight gradients, which take no time where backwards are whole.

    Attributes
    ----------
    seconds
        Of all tasks, shape ((5 S - 2) M + 2 S,).
    turns
        Microbatches m and m + ``turns`` run on the same devices in every stage.
    limits
        How many microbatches fit in memory where the stage runs this one, shape (S, M).
    machines
        The tasks of every machine that take time.
    """

    stages: int
    microbatches: int
    seconds: Floats
    turns: int
    limits: Ints
    machines: tuple[Ints, ...]

    def rows(self, values: Floats) -> Floats:
        """A view of the values of the rows, shape (5 S - 2, M)."""
        return values[: -2 * self.stages].reshape(-1, self.microbatches)

    def endings(self, values: Floats) -> tuple[Floats, Floats]:
        """Views of the values of the all-reduces and of the optimizer steps, shape (S,)."""
        return values[-2 * self.stages : -self.stages], values[-self.stages :]

    @cached_property
    def busy(self) -> tuple[tuple[Ints, Bools], ...]:
        """The machines whose pairs of tasks are looked at, with the pairs; none if too many."""
        loads = [float(self.seconds[own].sum()) for own in self.machines]
        least = BUSY * max(loads, default=0.0)
        busy = [own for own, load in zip(self.machines, loads, strict=True) if load >= least]
        if sum(len(own) ** 2 for own in busy) > PAIRS:
            return ()
        return tuple((own, self._follows(own)) for own in busy)

    def _follows(self, own: Ints) -> Bools:
        """Whether task ``own[j]`` follows ``own[i]`` in every schedule, at [j, i].

        A task of microbatch m follows all that comes before it on the way of microbatches m, m -
        ``turns``, ... An ending follows all that comes before the backwards of its stage.
        """
        _, backward, weight = numbering(self.stages)
        row, m = np.divmod(own, self.microbatches)
        is_weight, is_ending = (weight[0] <= row) & (row <= weight[-1]), row > weight[-1]
        stage = np.where(is_weight, row - weight[0], -1)
        first = (weight[-1] + 1) * self.microbatches
        stage[is_ending] = (own[is_ending] - first) % self.stages
        reach = np.where(stage < 0, row, backward[stage])[:, None]
        apart = m[:, None] - m
        in_time = is_ending[:, None] | ((apart >= 0) & (apart % self.turns == 0))
        before = np.where(stage < 0, row <= reach, is_weight & (stage == stage[:, None]))
        np.fill_diagonal(before, False)
        return np.asarray(in_time & before)


def tasks_of(work: Work, endings: Endings) -> Tasks:
    """The tasks of a structure."""
    stages, count = work.lane.shape
    forward, backward, weight = numbering(stages)
    rows = np.zeros((5 * stages - 2, count))
    rows[forward], rows[backward], rows[weight] = work.seconds[:3]
    rows[forward[:-1] + 1] = work.seconds[3, :-1]
    rows[backward[1:] + 1] = work.seconds[4, 1:]
    after = np.nan_to_num(endings.reduce), np.nan_to_num(endings.update)
    seconds = np.concatenate([rows.ravel(), *after])
    machines = {tuple(own[seconds[own] > 0].tolist()) for own in _machines(work, endings)}
    return Tasks(
        stages=stages,
        microbatches=count,
        seconds=seconds,
        turns=lcm(*np.bincount(work.stage).tolist()),
        limits=_limits(work),
        machines=tuple(np.array(own) for own in sorted(machines) if own),
    )


def tasks_of_stages(problem: PipelineProblem, stages: Sequence[Stage], parts: bool) -> Tasks:
    """The tasks of stages that may split their backwards where they can, if ``parts``."""
    return tasks_of(*work_of_stages(problem, stages, parts))


def _machines(work: Work, endings: Endings) -> Iterator[Ints]:
    """The tasks of every device, its all-reduces, and every channel."""
    stages, count = work.lane.shape
    number = np.arange((5 * stages - 2) * count).reshape(-1, count)
    rows = np.stack(numbering(stages))
    closed: list[list[int]] = [[] for _ in work.places]
    for stage, group in enumerate(endings.devices):
        for v in group:
            closed[v].append(number.size + stage)
    for lanes, own in {*zip(map(tuple, work.places), map(tuple, closed), strict=True)}:
        computed = [
            number[rows[:, s]][:, work.lane[s] == n].ravel()
            for n, s in zip(lanes, work.stage[[*lanes]], strict=True)
        ]
        yield np.concatenate([*computed, np.array(own, int) + stages])
        yield np.array(own, int)
    forward, backward, _ = rows
    for channel in range(int(work.channel.max()) + 1):
        s, m = np.nonzero(work.channel == channel)
        yield np.concatenate([number[forward[s] + 1, m], number[backward[s + 1] + 1, m]])


def _limits(work: Work) -> Ints:
    """How many microbatches fit at once on a lane, for every stage and microbatch.

    If all backwards are whole, what a microbatch keeps for a stage is held together with what it
    keeps for the earlier stages of the device.
    """
    count, whole = work.lane.shape[1], not work.split.any()
    always = np.bincount(work.stage) == 1  # stages that run every microbatch on the same devices
    most = np.full(len(work.stage), count)
    for n, s in enumerate(work.stage):
        for v in work.members[n]:
            earlier = [o for o in work.places[v] if work.stage[o] < s and always[work.stage[o]]]
            size = work.kept[n] + (work.kept[earlier].sum() if whole else 0.0)
            if size > 0:
                most[n] = min(most[n], int(work.room[v] * (1 + ROUNDING) // size))
    return np.asarray(np.maximum(most, 1)[work.lane])


EDGE_FINDING = "edge finding on devices and channels"

ROUNDS = 50
SLACK = 1e-9  # relative; more than the rounding of the sums


class TaskWindow(NamedTuple):
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


def load_bound(problem: PipelineProblem, structure: Structure) -> float:
    """A bound of :func:`quick_device_bound` or less from the loads of devices, in far less time.

    A device begins after the forwards of the stages before its first one. After its last backward
    come those of the stages before this one, or its all-reduce and its optimizer step.
    """
    size = len(problem.cluster)
    load, heads, tails = np.zeros(size), np.full(size, inf), np.full(size, inf)
    head, back = 0.0, 0.0
    for stage, split in zip(structure.stages, structure.split, strict=True):
        lanes, each = positions(problem, stage), lane_seconds(problem, stage, split)
        devices = [v for lane in lanes for v in lane]
        for lane, times in enumerate(each):
            load[lanes[lane]] += len(range(lane, problem.microbatches, stage.turns)) * sum(times)
        ending = reduce_seconds(problem, stage) + update_seconds(problem, stage)
        heads[devices] = np.minimum(heads[devices], head)
        tails[devices] = np.minimum(tails[devices], ending if split else max(ending, back))
        head += min(forward for forward, _, _ in each)
        back = max(ending, back) + min(of_input for _, of_input, _ in each)
    used = load > 0
    return float((heads + load + tails)[used].max(initial=0.0))


def machine_bound(tasks: Tasks, window: TaskWindow) -> float:
    """The longest path and the longest of Jackson's preemptive schedules of all machines."""
    heads, tails = window
    ways = heads + tails
    best = float((ways + tasks.seconds).max())
    loads = [float(tasks.seconds[own].sum()) for own in tasks.machines]
    for load, i in sorted(((load, i) for i, load in enumerate(loads)), reverse=True):
        own = tasks.machines[i]
        # Jackson's schedule of some of the tasks: the least head, their load, the least tail.
        if ways[own].max() + load > best:
            best = max(best, one_machine_bound(heads[own], tasks.seconds[own], tails[own]))
    return best


def window_of(tasks: Tasks) -> TaskWindow:
    """Heads and tails in every schedule."""
    found = _narrowed(tasks, inf, _nothing(tasks))
    assert found is not None  # there is a schedule of some length
    return found


def _nothing(tasks: Tasks) -> TaskWindow:
    return TaskWindow(np.zeros(len(tasks.seconds)), np.zeros(len(tasks.seconds)))


def is_refuted(tasks: Tasks, target: float, window: TaskWindow) -> bool:
    """Whether edge finding shows that no schedule takes ``target`` seconds or less.

    ``window`` holds for every schedule.
    """
    return _narrowed(tasks, target, window) is None


def _narrowed(tasks: Tasks, target: float, known: TaskWindow) -> TaskWindow | None:
    """Heads and tails in every schedule of at most ``target`` seconds; None if there is none."""
    found = TaskWindow(known.heads.copy(), known.tails.copy())
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
    tasks: Tasks, window: TaskWindow, own: Ints, follows: Bools, target: float, slack: float
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


def _follow_paths(tasks: Tasks, window: TaskWindow) -> None:
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
