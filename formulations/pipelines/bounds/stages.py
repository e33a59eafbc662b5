"""Lower bounds on every schedule of fixed stages, each from a short argument.

Notation: F(s, m), B(s, m) and W(s, m) are the forward, backward (or input gradient) and weight
gradient of microbatch m on stage s, in the order of microbatches (see :mod:`makespan`); k is the
in-flight limit of stage s, at most M. The *head* of a block is the least time before its microbatch
reaches it, the *tail* the least time after it. If backwards are whole, W takes no time and ends
with B. A device may have several stages: an argument about one stage ignores the others on its
device, which makes it weaker but still valid; an argument about a device uses the least head and
the least tail of its stages.

Lower bounds on the makespan and the span of given stages, wherever they are placed.

No transfers count, since neighbouring stages may share a device. For M microbatches of S stages
with times F, B (or I, W) on at most D devices:

* Load: all computations are done by D devices, and no stage is divided. With more stages than
  devices, two of the D + 1 stages that take longest share a device.
* Start and end: only the device of stage 0 computes at once. The first computation of a device is
  the forward of some stage s, after the forwards of 0, ..., s - 1, and devices have different ones,
  so that together they wait at least as long as the first D of these sums. The last computation of
  a device is the backward of another stage each, if backwards are whole, and the same holds for
  what follows it. A device without stages is idle all the time, which is longer.
* One stage: its computations are on one device, between the forwards before it and, if backwards
  are whole, the backwards that follow its last one.
* Balance: each device has the work of its stages, and waits as above for its first one. An integer
  program places the stages so that the longest such time is as short as possible.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from stagewright.formulations.forms.models import LinearProgram
from stagewright.formulations.pipelines.blocks import NONE, BlockGraph, blocks_of
from stagewright.formulations.pipelines.bounds.memory import StagePaths, window_bounds
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT, PlanClass
from stagewright.graphs.documents.arrays import Floats

LOAD = "load of all devices in every placement"
ENDS = "load, start and end of all devices in every placement"
_ONE_STAGE = "one stage in every placement"
BALANCE = "balance of load, start and end in every placement"

TICKS = 2**30  # of the time of all computations


def placement_bounds(problem: MakespanProblem, devices: int, plans: PlanClass) -> tuple[Bound, ...]:
    """Bounds on the objective of ``problem`` with its stages on at most that many devices."""
    found = [(LOAD, _load(problem, devices))]
    if problem.objective == "makespan":
        found += _with_ends(problem, devices)
    return tuple(Bound(seconds, name, "schedule", plans) for name, seconds in found)


def _work(problem: MakespanProblem) -> Floats:
    """The time of all microbatches on each stage."""
    work = np.array(problem.forward) + problem.backward
    return problem.microbatches * (work + (problem.weight_gradient or 0.0))


def _load(problem: MakespanProblem, devices: int) -> float:
    work = np.sort(_work(problem))[::-1]
    pair = work[devices - 1 : devices + 1].sum() if len(work) > devices else 0.0
    return float(max(work.sum() / devices, work[0], pair))


@dataclass(frozen=True, slots=True, eq=False)
class Balance:
    """The integer program of ``BALANCE``; its objective is in units of ``unit``.

    Columns: the longest time T; for every stage and device whether it is there, then whether it is
    the device's first. Times are rounded down.
    """

    form: LinearProgram
    unit: float

    @classmethod
    def of(cls, problem: MakespanProblem, devices: int) -> "Balance":
        """The program for at most that many devices."""
        work, stages = _work(problem), problem.stages
        heads, tails = _ends(problem)
        waits = heads + tails if problem.objective == "makespan" else np.zeros(stages)
        unit = float((work + waits).sum()) / TICKS or 1.0
        work_ticks, wait_ticks = np.floor(work / unit), np.floor(waits / unit)
        here, alike = sparse.eye_array(devices), sparse.eye_array(stages)
        each, earlier = np.ones((1, devices)), np.tril(np.ones((stages, stages)))
        rows = [
            # Every stage has one device; a device has at most one first stage, which it has.
            [None, sparse.kron(alike, each), None],
            [None, None, sparse.kron(np.ones((1, stages)), here)],
            [None, sparse.kron(alike, here), -sparse.kron(alike, here)],
            # The first stage on the device of s is s or an earlier one.
            [None, -sparse.kron(alike, here), sparse.kron(earlier, here)],
            [
                np.ones((devices, 1)),
                -sparse.kron(work_ticks[None, :], here),
                -sparse.kron(wait_ticks[None, :], here),
            ],
        ]
        pairs = stages * devices
        most = np.r_[np.ones(stages + devices), np.full(2 * pairs + devices, np.inf)]
        lower = np.zeros(1 + 2 * pairs)
        lower[1] = 1  # devices are alike: stage 0 is on 0
        return cls(
            form=LinearProgram(
                cost=np.r_[1.0, np.zeros(2 * pairs)],
                matrix=sparse.csr_array(sparse.block_array(rows)),
                row_lower=np.r_[np.ones(stages), np.zeros(devices + 2 * pairs + devices)],
                row_upper=most,
                lower=lower,
                upper=np.r_[2.0 * TICKS, np.ones(2 * pairs)],
                integral=np.ones(1 + 2 * pairs, dtype=bool),
            ),
            unit=unit,
        )


def _ends(problem: MakespanProblem) -> tuple[Floats, Floats]:
    """The forwards before every stage, and the whole backwards after it."""
    heads = np.cumsum([0.0, *problem.forward[:-1]])
    if problem.is_split:
        return heads, np.zeros_like(heads)
    return heads, np.cumsum([0.0, *problem.backward[:-1]])


def _with_ends(problem: MakespanProblem, devices: int) -> Iterator[tuple[str, float]]:
    work = _work(problem)
    heads, tails = _ends(problem)
    ends = np.sort(heads)[:devices].sum() + np.sort(tails)[:devices].sum()
    if problem.stages >= devices:
        yield ENDS, float((work.sum() + ends) / devices)
    yield _ONE_STAGE, float((heads + work + tails).max())


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
