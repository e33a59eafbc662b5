"""Lower bounds on every schedule of fixed stages, each by a short argument of its own.

Notation: F(s, m), B(s, m) and W(s, m) are the forward, backward (or input gradient) and weight
gradient of microbatch m on stage s, taken in the order of microbatches (see :mod:`makespan`); k is
the in-flight limit of stage s, at most M. The *head* of a block is the time before its microbatch
can reach it, the *tail* the time that must follow it. Where backwards are whole, W takes no time
and ends with B. A device may have several stages: an argument about one stage ignores the others on
its device and is the weaker for it, but valid; one about a device takes the least head and the
least tail of its stages.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stagewright.formulations.pipelines.blocks import NONE, Blocks, blocks_of
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT, PlanClass
from stagewright.graphs.documents.arrays import Floats

ONE_MACHINE = "one-machine relaxation"


def schedule_bounds(problem: MakespanProblem) -> tuple[Bound, ...]:
    """All bounds, in the problem's unit of time; the largest is the one to keep."""
    ways = _Ways.of(problem)
    named = [(name, bound(problem, ways)) for name, bound in QUICK]
    named.append((ONE_MACHINE, one_machine_relaxation(problem, ways)))
    plans = plans_of(problem)
    return tuple(Bound(seconds, name, "schedule", plans) for name, seconds in named)


def plans_of(problem: MakespanProblem) -> PlanClass:
    """The class of plans whose schedules are those of ``problem``.

    Where backwards are split, whole ones are included that take as long as their two parts: a part
    after the other is a schedule of the problem.
    """
    return replace(
        DISJOINT_SPLIT,
        sharing="none" if problem.is_disjoint else "groups",
        split_backward=problem.is_split,
    )


def quick_bound(problem: MakespanProblem) -> float:
    """The largest of all bounds but the one-machine relaxation, which takes the most time."""
    ways = _Ways.of(problem)
    return max(bound(problem, ways) for _, bound in QUICK)


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """Per stage, shape (S,): the way of one microbatch alone.

    ``head`` before F(s), ``round_trip`` from the start of F(s) to the start of B(s), ``tail`` after
    B(s): weight gradients and all-reduces of s and of the stages before it included.
    ``weight_gradient`` is 0 where backwards are whole.
    """

    head: Floats
    round_trip: Floats
    tail: Floats
    weight_gradient: Floats

    @classmethod
    def of(cls, problem: MakespanProblem) -> "_Ways":
        stages = problem.stages
        weight = np.array(problem.weight_gradient or np.zeros(stages))
        head, round_trip, tail = np.zeros(stages), np.zeros(stages), weight + problem.reduce
        for s in range(1, stages):
            head[s] = head[s - 1] + problem.forward[s - 1] + problem.send_forward[s - 1]
            onward = problem.send_backward[s - 1] + problem.backward[s - 1] + tail[s - 1]
            tail[s] = max(tail[s], onward)
        round_trip[-1] = problem.forward[-1]
        for s in reversed(range(stages - 1)):
            sends = problem.send_forward[s] + problem.send_backward[s]
            round_trip[s] = problem.forward[s] + sends + round_trip[s + 1] + problem.backward[s + 1]
        return cls(head, round_trip, tail, weight)


def critical_path(problem: MakespanProblem, ways: _Ways) -> float:
    """One microbatch passes all its blocks, and an all-reduce follows where there is one.

    Each block waits for the one before, and no all-reduce starts before the backward (weight
    gradient) of its stage.
    """
    return float((ways.head + ways.round_trip + np.array(problem.backward) + ways.tail).max())


def busiest_device(problem: MakespanProblem, ways: _Ways) -> float:
    """The least head of a device's stages, all their work, and the least that must follow.

    The device works on one block at a time and starts no earlier than the least head. Of forwards
    and backwards the last is a backward, which the tail of its stage follows; of all blocks the
    last is a weight gradient where backwards are split, and an all-reduce follows.
    """
    head, tail = _least(problem, ways.head), _least(problem, ways.tail)
    work = problem.microbatches * (np.array(problem.forward) + np.array(problem.backward))
    weights = problem.microbatches * ways.weight_gradient
    load = head + np.bincount(problem.device, work)
    ends = load + np.bincount(problem.device, weights) + _least(problem, problem.reduce)
    return float(max((load + tail).max(), ends.max()))


def _least(problem: MakespanProblem, values: ArrayLike) -> Floats:
    """The least of the stages' values on each device."""
    least = np.full(max(problem.device) + 1, np.inf)
    np.minimum.at(least, np.array(problem.device), np.asarray(values))
    return least


def busiest_channel(problem: MakespanProblem, ways: _Ways) -> float:
    """The same for the channel after a stage, which both directions share.

    Its first transfer follows a forward of the stage, and the backward of the stage, with its tail,
    follows the last.
    """
    sends = np.array(problem.send_forward) + np.array(problem.send_backward)
    around = ways.head + np.array(problem.forward) + np.array(problem.backward) + ways.tail
    return float((around[:-1] + problem.microbatches * sends).max(initial=0.0))


def warm_up_and_drain(problem: MakespanProblem, ways: _Ways) -> float:
    """Between its first forward and first backward a stage has at most k forwards to do.

    Those two starts are a round trip R apart, so that the stage does nothing for R - k f at least.
    In the mirror image, between the start of the last forward and that of the last backward lie R,
    and in it this forward and the backwards (and weight gradients) of at most k - 1 microbatches.
    If M > k the two spans are disjoint, since F(k) waits for W(0), and both count; otherwise the
    longer. Up to the last backward, weight gradients may be left out of the work and of the second
    span; up to the last weight gradient they count in both.
    """
    forward, backward = np.array(problem.forward), np.array(problem.backward)
    found = []
    for last, after in (
        (backward, ways.tail),
        (backward + ways.weight_gradient, np.array(problem.reduce)),
    ):
        limit = _limits(problem)
        warm_up = np.maximum(0.0, ways.round_trip - limit * forward)
        drain = np.maximum(0.0, ways.round_trip - forward - (limit - 1) * last)
        both = np.where(problem.microbatches > limit, warm_up + drain, np.maximum(warm_up, drain))
        load = problem.microbatches * (forward + last)
        found.append(float((ways.head + load + both + after).max()))
    return max(found)


def in_flight_slots(problem: MakespanProblem, ways: _Ways) -> float:
    """With k slots, ceil(M / k) microbatches hold the same slot one after the other.

    F(s, m + k) waits for the end of W(s, m), so that F(s, 0), B(s, 0), W(s, 0), F(s, k), ... form a
    chain, and each turn takes a round trip, a backward and a weight gradient.
    """
    turns = np.ceil(problem.microbatches / _limits(problem))
    held = ways.round_trip + np.array(problem.backward)
    waits = (turns - 1) * ways.weight_gradient
    return float((ways.head + turns * held + waits + ways.tail).max())


def one_machine_relaxation(problem: MakespanProblem, ways: _Ways) -> float:
    """Jackson's preemptive schedule on each device and each channel alone.

    After Carlier and Pinson (1989). The heads and tails of the blocks are longest paths over all
    that is fixed beforehand: the order of blocks in a microbatch, the order of microbatches in a
    block, and the in-flight limits. Every schedule keeps them, on every resource, so that the best
    preemptive schedule of one resource is a lower bound, whichever blocks of whichever stages the
    resource does.
    """
    blocks, count = blocks_of(problem), problem.microbatches
    head = _longest_paths(blocks, count)
    # Time reversed, the problem has the same form: its heads are the tails.
    tail = _longest_paths(blocks.reversed(), count)[::-1, ::-1]
    best = 0.0
    for own in blocks.members():
        work = np.repeat(blocks.durations[own], count)
        best = max(best, one_machine_bound(head[own].ravel(), work, tail[own].ravel()))
    return best


def one_machine_bound(heads: ArrayLike, durations: ArrayLike, tails: ArrayLike) -> float:
    """The makespan of Jackson's preemptive schedule, the longest tail first.

    It bounds every schedule of tasks that become available at ``heads``, take ``durations`` on one
    machine, and are followed by ``tails``; O(n log n).
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


def _longest_paths(blocks: Blocks, microbatches: int) -> Floats:
    """Earliest starts, shape (blocks, M), if devices and channels had no limit but the order."""
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


QUICK: tuple[tuple[str, Callable[[MakespanProblem, _Ways], float]], ...] = (
    ("critical path", critical_path),
    ("busiest device", busiest_device),
    ("busiest channel", busiest_channel),
    ("warm-up and drain", warm_up_and_drain),
    ("in-flight slots", in_flight_slots),
)

NAMES = (*(name for name, _ in QUICK), ONE_MACHINE)
