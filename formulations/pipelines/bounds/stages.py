"""Lower bounds on every schedule of fixed stages, each from a short argument.

Notation: F(s, m), B(s, m) and W(s, m) are the forward, backward (or input gradient) and weight
gradient of microbatch m on stage s, in the order of microbatches (see :mod:`makespan`); k is the
in-flight limit of stage s, at most M. The *head* of a block is the least time before its microbatch
reaches it, the *tail* the least time after it. If backwards are whole, W takes no time and ends
with B. A device may have several stages: an argument about one stage ignores the others on its
device, which makes it weaker but still valid; an argument about a device uses the least head and
the least tail of its stages.
"""

import heapq
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stagewright.formulations.pipelines.blocks import NONE, BlockGraph, blocks_of
from stagewright.formulations.pipelines.bounds.memory import StagePaths, window_bounds
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT, PlanClass
from stagewright.graphs.documents.arrays import Floats

ONE_MACHINE = "one-machine relaxation"


def schedule_bounds(problem: MakespanProblem) -> tuple[Bound, ...]:
    """All bounds, in the problem's unit of time; the largest is the best."""
    paths = StagePaths.of(problem)
    named = _quick(problem, paths)
    if problem.objective == "makespan":
        named.append((ONE_MACHINE, _one_machine_relaxation(problem, paths)))
    plans = plans_of(problem)
    return tuple(Bound(seconds, name, "schedule", plans) for name, seconds in named)


def plans_of(problem: MakespanProblem) -> PlanClass:
    """The class of plans whose schedules are those of ``problem``.

    With split backwards it includes whole ones that take as long as their two parts, since running
    the parts in sequence is a schedule of the problem.
    """
    return replace(
        DISJOINT_SPLIT,
        sharing="none" if problem.is_disjoint else "groups",
        split_backward=problem.is_split,
    )


def quick_bound(problem: MakespanProblem) -> float:
    """The largest of all bounds except the one-machine relaxation, which is the slowest."""
    return max(bound for _, bound in _quick(problem, StagePaths.of(problem)))


def _quick(problem: MakespanProblem, paths: StagePaths) -> list[tuple[str, float]]:
    if problem.objective == "span":
        return window_bounds(problem, paths)
    named = [(name, bound(problem, paths)) for name, bound in QUICK]
    return named + window_bounds(problem, paths) if problem.memory else named


def critical_path(problem: MakespanProblem, paths: StagePaths) -> float:
    """The time of one microbatch through all its blocks, followed by any all-reduce.

    Each block waits for the previous one, and no all-reduce starts before the backward (weight
    gradient) of its stage ends.
    """
    return float((paths.head + paths.round_trip + np.array(problem.backward) + paths.tail).max())


def _busiest_device(problem: MakespanProblem, paths: StagePaths) -> float:
    """The least head of a device's stages, plus all their work, plus the least tail.

    The device runs one block at a time and starts no earlier than the least head. Of its forwards
    and backwards the last is a backward, followed by the tail of its stage; if backwards are split,
    the last block is a weight gradient, followed by an all-reduce.
    """
    head, tail = _least(problem, paths.head), _least(problem, paths.tail)
    work = problem.microbatches * (np.array(problem.forward) + np.array(problem.backward))
    weights = problem.microbatches * paths.weight_gradient
    load = head + np.bincount(problem.device, work)
    ends = load + np.bincount(problem.device, weights) + _least(problem, problem.reduce)
    return float(max((load + tail).max(), ends.max()))


def _least(problem: MakespanProblem, values: ArrayLike) -> Floats:
    """The least value per device over its stages."""
    least = np.full(max(problem.device) + 1, np.inf)
    np.minimum.at(least, np.array(problem.device), np.asarray(values))
    return least


def _busiest_channel(problem: MakespanProblem, paths: StagePaths) -> float:
    """The same bound for the channel after a stage, which both directions may share.

    A forward of the stage precedes its first transfer; the backward of the stage and its tail
    follow the last transfer. If they do not share it, each direction is a channel; one that only
    carries forwards is followed by a transfer back, so that the bound holds without this time.
    """
    both = np.array([problem.send_forward, problem.send_backward])
    sends = both.sum(axis=0) if problem.duplex == "half" else both.max(axis=0)
    around = paths.head + np.array(problem.forward) + np.array(problem.backward) + paths.tail
    return float((around[:-1] + problem.microbatches * sends).max(initial=0.0))


def warm_up_and_drain(problem: MakespanProblem, paths: StagePaths) -> float:
    """A stage is idle during warm-up and drain, as only k microbatches are in flight.

    Between the start of its first forward and of its first backward, a round trip R apart, a stage
    has at most k forwards to do, so it is idle for at least R - k f. By symmetry, between the start
    of the last forward and of the last backward, also R apart, it has this forward and the
    backwards (and weight gradients) of at most k - 1 microbatches to do. If M > k the two intervals
    are disjoint, since F(k) waits for W(0), and both count; otherwise the longer one counts. For a
    bound on the last backward, weight gradients are left out of the work and of the second
    interval; for a bound on the last weight gradient, they count in both.
    """
    forward, backward = np.array(problem.forward), np.array(problem.backward)
    found = []
    for last, after in (
        (backward, paths.tail),
        (backward + paths.weight_gradient, np.array(problem.reduce)),
    ):
        limit = _limits(problem)
        warm_up = np.maximum(0.0, paths.round_trip - limit * forward)
        drain = np.maximum(0.0, paths.round_trip - forward - (limit - 1) * last)
        both = np.where(problem.microbatches > limit, warm_up + drain, np.maximum(warm_up, drain))
        load = problem.microbatches * (forward + last)
        found.append(float((paths.head + load + both + after).max()))
    return max(found)


def _in_flight_slots(problem: MakespanProblem, paths: StagePaths) -> float:
    """With k slots, ceil(M / k) microbatches use the same slot in sequence.

    F(s, m + k) waits for the end of W(s, m), so F(s, 0), B(s, 0), W(s, 0), F(s, k), ... form a
    chain, and each microbatch of it takes a round trip, a backward and a weight gradient.
    """
    rounds = np.ceil(problem.microbatches / _limits(problem))
    slot = paths.round_trip + np.array(problem.backward)
    waits = (rounds - 1) * paths.weight_gradient
    return float((paths.head + rounds * slot + waits + paths.tail).max())


def _one_machine_relaxation(problem: MakespanProblem, paths: StagePaths) -> float:
    """Jackson's preemptive schedule on each device and each channel separately.

    After Carlier and Pinson (1989). The heads and tails of the blocks are longest paths over the
    fixed precedences: the order of blocks in a microbatch, the order of microbatches in a block,
    and the in-flight limits. Every schedule respects them, so the optimal preemptive schedule of
    any one resource is a lower bound.
    """
    blocks, count = blocks_of(problem), problem.microbatches
    head = longest_paths(blocks, count)
    # The tails are the heads of the problem reversed in time, which has the same form.
    tail = longest_paths(blocks.reversed(), count)[::-1, ::-1]
    best = 0.0
    for own in blocks.members():
        work = np.repeat(blocks.durations[own], count)
        best = max(best, one_machine_bound(head[own].ravel(), work, tail[own].ravel()))
    return best


def one_machine_bound(heads: ArrayLike, durations: ArrayLike, tails: ArrayLike) -> float:
    """The makespan of Jackson's preemptive schedule: longest tail first.

    A lower bound on every one-machine schedule of tasks with release times ``heads``, processing
    times ``durations`` and delivery times ``tails``; O(n log n).
    """
    entries = zip(
        np.asarray(heads).tolist(),
        np.asarray(durations).tolist(),
        np.asarray(tails).tolist(),
        strict=True,
    )
    tasks = sorted(entries, reverse=True)
    waiting: list[tuple[float, float]] = []  # (-tail, work left)
    now = makespan = 0.0
    while tasks or waiting:
        if not waiting:
            now = max(now, tasks[-1][0])
        while tasks and tasks[-1][0] <= now:
            _, work, tail = tasks.pop()
            heapq.heappush(waiting, (-tail, work))
        tail, work = heapq.heappop(waiting)
        if tasks and tasks[-1][0] < now + work:
            heapq.heappush(waiting, (tail, now + work - tasks[-1][0]))
            now = tasks[-1][0]
        else:
            now += work
            makespan = max(makespan, now - tail)
    return makespan


def _limits(problem: MakespanProblem) -> NDArray[np.int64]:
    return np.minimum(problem.in_flight, problem.microbatches)


def longest_paths(blocks: BlockGraph, microbatches: int) -> Floats:
    """Earliest starts with unlimited devices and channels, shape (blocks, M)."""
    work, release = blocks.durations.tolist(), blocks.releases.tolist()
    before = [[i for i in row if i != NONE] for row in blocks.before.tolist()]
    freeing, limits = blocks.freeing.tolist(), blocks.limits.tolist()
    columns: list[list[float]] = []
    for m in range(microbatches):
        column: list[float] = []
        for j, waits in enumerate(before):
            start = release[j]
            for i in waits:
                start = max(start, column[i] + work[i])
            if m:
                start = max(start, columns[-1][j] + work[j])
            if freeing[j] != NONE and m >= limits[j]:
                start = max(start, columns[m - limits[j]][freeing[j]] + work[freeing[j]])
            column.append(start)
        columns.append(column)
    return np.array(columns).T


QUICK: tuple[tuple[str, Callable[[MakespanProblem, StagePaths], float]], ...] = (
    ("critical path", critical_path),
    ("busiest device", _busiest_device),
    ("busiest channel", _busiest_channel),
    ("warm-up and drain", warm_up_and_drain),
    ("in-flight slots", _in_flight_slots),
)

NAMES = (*(name for name, _ in QUICK), ONE_MACHINE)
