"""Lower bounds on every schedule of fixed stages, each by a short argument of its own.

Notation: F(s, m) and B(s, m) are the forward and backward of microbatch m on stage s, taken in the
order of microbatches (see :mod:`makespan`); k is the in-flight limit of
stage s, at most M. The *head* of a block is the time before its microbatch can reach it, the
*tail* the time that must follow it.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT
from stagewright.graphs.documents.arrays import Floats

ONE_MACHINE = "one-machine relaxation"


def schedule_bounds(problem: MakespanProblem) -> tuple[Bound, ...]:
    """All bounds, in the problem's unit of time; the largest is the one to keep."""
    ways = _Ways.of(problem)
    named = [(name, bound(problem, ways)) for name, bound in QUICK]
    named.append((ONE_MACHINE, one_machine_relaxation(problem, ways)))
    return tuple(Bound(seconds, name, "schedule", DISJOINT_SPLIT) for name, seconds in named)


def quick_bound(problem: MakespanProblem) -> float:
    """The largest of all bounds but the one-machine relaxation, which takes the most time."""
    ways = _Ways.of(problem)
    return max(bound(problem, ways) for _, bound in QUICK)


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """Per stage, shape (S,): the way of one microbatch alone.

    ``head`` before F(s), ``round_trip`` from the start of F(s) to the start of B(s), ``tail`` after
    B(s), the all-reduces of s and of the stages before it included.
    """

    head: Floats
    round_trip: Floats
    tail: Floats

    @classmethod
    def of(cls, problem: MakespanProblem) -> "_Ways":
        stages = problem.stages
        head, round_trip, tail = np.zeros(stages), np.zeros(stages), np.array(problem.reduce)
        for s in range(1, stages):
            head[s] = head[s - 1] + problem.forward[s - 1] + problem.send_forward[s - 1]
            onward = problem.send_backward[s - 1] + problem.backward[s - 1] + tail[s - 1]
            tail[s] = max(tail[s], onward)
        round_trip[-1] = problem.forward[-1]
        for s in reversed(range(stages - 1)):
            sends = problem.send_forward[s] + problem.send_backward[s]
            round_trip[s] = problem.forward[s] + sends + round_trip[s + 1] + problem.backward[s + 1]
        return cls(head, round_trip, tail)


def critical_path(problem: MakespanProblem, ways: _Ways) -> float:
    """One microbatch passes all its blocks, and an all-reduce follows where there is one.

    The blocks of a microbatch never overlap, and no all-reduce starts before the backward of its
    stage.
    """
    return float((ways.head + ways.round_trip + np.array(problem.backward) + ways.tail).max())


def busiest_device(problem: MakespanProblem, ways: _Ways) -> float:
    """Head of a stage, all its forwards and backwards, and what must follow.

    The stage cannot start before its head, works on one block at a time, and its last block is a
    backward, which the tail follows.
    """
    load = problem.microbatches * (np.array(problem.forward) + np.array(problem.backward))
    return float((ways.head + load + ways.tail).max())


def busiest_channel(problem: MakespanProblem, ways: _Ways) -> float:
    """The same for the channel behind a stage, which both directions share.

    Its first transfer follows a forward of the stage, and the backward of the stage, with its tail,
    follows the last.
    """
    sends = np.array(problem.send_forward) + np.array(problem.send_backward)
    around = ways.head + np.array(problem.forward) + np.array(problem.backward) + ways.tail
    return float((around[:-1] + problem.microbatches * sends).max(initial=0.0))


def warm_up_and_drain(problem: MakespanProblem, ways: _Ways) -> float:
    """Between its first forward and first backward a stage has at most k forwards to do.

    Those two starts are a round trip R apart, so that the stage idles for R - k f at least. In the
    mirror image, between the start of the last forward and that of the last backward lie R, and in
    it this forward and at most k - 1 backwards. If M > k the two spans are disjoint, since F(k)
    waits for B(0), and both idle times count; otherwise the larger.
    """
    forward, backward = np.array(problem.forward), np.array(problem.backward)
    limit = _limits(problem)
    warm_up = np.maximum(0.0, ways.round_trip - limit * forward)
    drain = np.maximum(0.0, ways.round_trip - forward - (limit - 1) * backward)
    both = np.where(problem.microbatches > limit, warm_up + drain, np.maximum(warm_up, drain))
    load = problem.microbatches * (forward + backward)
    return float((ways.head + load + both + ways.tail).max())


def in_flight_slots(problem: MakespanProblem, ways: _Ways) -> float:
    """With k slots, ceil(M / k) microbatches hold the same slot one after the other.

    F(s, m + k) waits for the end of B(s, m), so that F(s, 0), B(s, 0), F(s, k), B(s, k), ... form a
    chain, and each pair takes a round trip and a backward.
    """
    turns = np.ceil(problem.microbatches / _limits(problem))
    held = ways.round_trip + np.array(problem.backward)
    return float((ways.head + turns * held + ways.tail).max())


def one_machine_relaxation(problem: MakespanProblem, ways: _Ways) -> float:
    """Jackson's preemptive schedule on each device and each channel alone.

    After Carlier and Pinson (1989). The heads and tails of the blocks are longest paths over all
    that is fixed beforehand: the order of blocks in a microbatch, the order of microbatches in a
    block, and the in-flight limits. Every schedule keeps them, on every resource, so that the best
    preemptive schedule of one resource is a lower bound.
    """
    durations, releases, tails = blocks_of(problem)
    limits = _limits(problem)
    head = _longest_paths(durations, releases, limits, problem.microbatches)
    # Time reversed, the problem has the same form: its heads are the tails.
    tail = _longest_paths(durations[::-1], tails[::-1], limits, problem.microbatches)[::-1, ::-1]
    count = problem.microbatches
    best = 0.0
    for there in range(len(durations) // 2):
        back = len(durations) - 1 - there
        work = np.repeat([durations[there], durations[back]], count)
        both = [there, back]
        best = max(best, one_machine_bound(head[both].ravel(), work, tail[both].ravel()))
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


def blocks_of(problem: MakespanProblem) -> tuple[Floats, Floats, Floats]:
    """Durations, release times and tails of the 4S - 2 blocks in the order of a microbatch's way.

    Block j < 2S - 1 is the forward of stage j/2 (j even) or the transfer behind it (j odd); block
    4S - 3 - j is the same way back, on the same device or channel. An all-reduce is the tail of its
    stage's backward.
    """
    last = 4 * problem.stages - 3
    durations, tails = np.zeros(last + 1), np.zeros(last + 1)
    stage = np.arange(problem.stages)
    durations[2 * stage], durations[last - 2 * stage] = problem.forward, problem.backward
    channel = stage[:-1]
    durations[2 * channel + 1] = problem.send_forward
    durations[last - 1 - 2 * channel] = problem.send_backward
    tails[last - 2 * stage] = problem.reduce
    return durations, np.zeros(last + 1), tails


def _limits(problem: MakespanProblem) -> NDArray[np.int64]:
    return np.minimum(problem.in_flight, problem.microbatches)


def _longest_paths(
    durations: Floats, releases: Floats, limits: NDArray[np.int64], microbatches: int
) -> Floats:
    """Earliest starts, shape (blocks, M), if devices and channels had no limit but the order."""
    last = len(durations) - 1
    work, release = durations.tolist(), releases.tolist()
    columns: list[list[float]] = []
    for m in range(microbatches):
        column, ready = [], 0.0
        for j in range(last + 1):
            start = max(ready, release[j])
            if m:
                start = max(start, columns[-1][j] + work[j])
            if 2 * j <= last and j % 2 == 0 and m >= limits[j // 2]:
                freed = columns[m - int(limits[j // 2])]
                start = max(start, freed[last - j] + work[last - j])
            column.append(start)
            ready = start + work[j]
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
