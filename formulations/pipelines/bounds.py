"""Lower bounds on every schedule of fixed stages, each by a short argument.

Notation: F(s, m), B(s, m) and W(s, m) are the forward, backward (or input gradient) and weight
gradient of microbatch m on stage s, taken in the order of microbatches (see :mod:`makespan`); k is
the in-flight limit of stage s, at most M. The *head* of a block is the time before its microbatch
can reach it, the *tail* the time that must follow it. If backwards are whole, W takes no time
and ends with B. A device may have several stages: arguments about one stage ignore the others,
which keeps the bound valid, and those about a device use the smallest head and tail of its stages.
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
    """All bounds, in the problem's unit of time; the largest is the best."""
    times = _MicrobatchTimes.of(problem)
    named = [(name, bound(problem, times)) for name, bound in QUICK]
    named.append((ONE_MACHINE, one_machine_relaxation(problem, times)))
    plans = plans_of(problem)
    return tuple(Bound(seconds, name, "schedule", plans) for name, seconds in named)


def plans_of(problem: MakespanProblem) -> PlanClass:
    """The class of plans whose schedules are those of ``problem``.

    With split backwards the class includes whole ones that take as long as their two parts, since
    the two parts in succession are a schedule of the problem.
    """
    return replace(
        DISJOINT_SPLIT,
        sharing="none" if problem.is_disjoint else "groups",
        split_backward=problem.is_split,
    )


def quick_bound(problem: MakespanProblem) -> float:
    """The largest of all bounds except the one-machine relaxation, which is the slowest."""
    times = _MicrobatchTimes.of(problem)
    return max(bound(problem, times) for _, bound in QUICK)


@dataclass(frozen=True, slots=True, eq=False)
class _MicrobatchTimes:
    """Times of a single microbatch relative to each stage, shape (S,).

    ``head`` before F(s), ``round_trip`` from the start of F(s) to the start of B(s), ``tail`` after
    B(s), including weight gradients and all-reduces of s and of the stages before it.
    ``weight_gradient`` is 0 if backwards are whole.
    """

    head: Floats
    round_trip: Floats
    tail: Floats
    weight_gradient: Floats

    @classmethod
    def of(cls, problem: MakespanProblem) -> "_MicrobatchTimes":
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


def critical_path(problem: MakespanProblem, times: _MicrobatchTimes) -> float:
    """The longest path of one microbatch through its blocks and the all-reduces.

    Each block waits for its predecessor, and no all-reduce starts before the backward (weight
    gradient) of its stage ends.
    """
    return float((times.head + times.round_trip + np.array(problem.backward) + times.tail).max())


def busiest_device(problem: MakespanProblem, times: _MicrobatchTimes) -> float:
    """The smallest head of a device's stages, plus all their work, plus the smallest tail.

    The device works on one block at a time and starts no earlier than the smallest head. Of
    forwards and backwards the last is a backward, followed by the tail of its stage; of all blocks
    the last is a weight gradient if backwards are split, followed by an all-reduce.
    """
    head, tail = _least(problem, times.head), _least(problem, times.tail)
    work = problem.microbatches * (np.array(problem.forward) + np.array(problem.backward))
    weights = problem.microbatches * times.weight_gradient
    load = head + np.bincount(problem.device, work)
    ends = load + np.bincount(problem.device, weights) + _least(problem, problem.reduce)
    return float(max((load + tail).max(), ends.max()))


def _least(problem: MakespanProblem, values: ArrayLike) -> Floats:
    """The minimum of the stages' values on each device."""
    least = np.full(max(problem.device) + 1, np.inf)
    np.minimum.at(least, np.array(problem.device), np.asarray(values))
    return least


def busiest_channel(problem: MakespanProblem, times: _MicrobatchTimes) -> float:
    """The same for the channel after a stage, which both directions share.

    Its first transfer follows a forward of the stage, and the backward of the stage, with its tail,
    follows the last.
    """
    sends = np.array(problem.send_forward) + np.array(problem.send_backward)
    around = times.head + np.array(problem.forward) + np.array(problem.backward) + times.tail
    return float((around[:-1] + problem.microbatches * sends).max(initial=0.0))


def warm_up_and_drain(problem: MakespanProblem, times: _MicrobatchTimes) -> float:
    """Idle time of a stage in warm-up and drain, plus its work.

    Between its first forward and first backward a stage runs at most k forwards. Their starts are
    at least a round trip R apart, so that the stage is idle for at least R - k f. Likewise the
    starts of its last forward and last backward are at least R apart, and between them the stage
    runs this forward and the backwards (and weight gradients) of at most k - 1 microbatches. If
    M > k the two spans are disjoint, since F(k) waits for W(0), and both idle times count;
    otherwise the longer. In the bound up to the last backward, weight gradients are left out of
    the work and of the second span; in that up to the last weight gradient they count in both.
    """
    forward, backward = np.array(problem.forward), np.array(problem.backward)
    found = []
    for last, after in (
        (backward, times.tail),
        (backward + times.weight_gradient, np.array(problem.reduce)),
    ):
        limit = _limits(problem)
        warm_up = np.maximum(0.0, times.round_trip - limit * forward)
        drain = np.maximum(0.0, times.round_trip - forward - (limit - 1) * last)
        both = np.where(problem.microbatches > limit, warm_up + drain, np.maximum(warm_up, drain))
        load = problem.microbatches * (forward + last)
        found.append(float((times.head + load + both + after).max()))
    return max(found)


def in_flight_slots(problem: MakespanProblem, times: _MicrobatchTimes) -> float:
    """With k slots in flight, ceil(M / k) microbatches use the same slot one after another.

    F(s, m + k) waits for the end of W(s, m), so that F(s, 0), B(s, 0), W(s, 0), F(s, k), ... form a
    chain, and each cycle takes a round trip, a backward and a weight gradient.
    """
    turns = np.ceil(problem.microbatches / _limits(problem))
    held = times.round_trip + np.array(problem.backward)
    waits = (turns - 1) * times.weight_gradient
    return float((times.head + turns * held + waits + times.tail).max())


def one_machine_relaxation(problem: MakespanProblem, times: _MicrobatchTimes) -> float:
    """Jackson's preemptive schedule on each device and each channel alone.

    After Carlier and Pinson (1989). The heads and tails of the blocks are longest paths over the
    fixed precedences: the order of blocks in a microbatch, the order of microbatches in a block,
    and the in-flight limits. Every schedule respects them, so the best preemptive schedule of a
    single resource is a lower bound, whatever blocks and stages it serves.
    """
    blocks, count = blocks_of(problem), problem.microbatches
    head = _longest_paths(blocks, count)
    # Reversed in time, the problem has the same form: its heads are the tails.
    tail = _longest_paths(blocks.reversed(), count)[::-1, ::-1]
    best = 0.0
    for own in blocks.members():
        work = np.repeat(blocks.durations[own], count)
        best = max(best, one_machine_bound(head[own].ravel(), work, tail[own].ravel()))
    return best


def one_machine_bound(heads: ArrayLike, durations: ArrayLike, tails: ArrayLike) -> float:
    """The makespan of Jackson's preemptive schedule, longest tail first.

    It is a lower bound for tasks that become available at ``heads``, take ``durations`` on one
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


QUICK: tuple[tuple[str, Callable[[MakespanProblem, _MicrobatchTimes], float]], ...] = (
    ("critical path", critical_path),
    ("busiest device", busiest_device),
    ("busiest channel", busiest_channel),
    ("warm-up and drain", warm_up_and_drain),
    ("in-flight slots", in_flight_slots),
)

NAMES = (*(name for name, _ in QUICK), ONE_MACHINE)
