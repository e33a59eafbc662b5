"""Answers for tiny instances, straight from the definitions, to hold the planners against.

Nothing here shares code with a planner or a scheduler: recurrences are recursions, optima are
enumerations. Only the problems' own cost model (seconds and bytes) is taken from the library.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise, permutations, product
from math import inf

from makespan_oracle import brute_force_makespan

from stagewright.formulations.pipelines.bppm import BalancedPartition, StageChoice
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.memory import in_flight_limit
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.solvers.pipelines.partition.passes import PartitionSearch

Stage = tuple[int, int, tuple[int, ...]]  # layers [start, stop) and device positions

# --- Partition, replication and mapping along a device order (SPP IV-B, algorithm 4) ---------


def prm_table(
    problem: PipelineProblem, order: Sequence[int], memory: bool = True
) -> dict[int, float]:
    """min over r of W(L, xi, r, V) for xi = 1..V stages on all of ``order``; inf if there is none.

    W is the recurrence of SPP section IV-B, in seconds for all microbatches. With ``memory``, the
    n-th stage from the end of the pipeline must hold min(M, n) microbatches in flight.
    """
    layers, devices = len(problem.chain), len(order)
    return {
        stages: min(
            _recurrence(problem, tuple(order), stages, memory)(layers, stages, r, devices)
            for r in range(1, devices + 1)
        )
        for stages in range(1, devices + 1)
    }


def _recurrence(problem: PipelineProblem, order: tuple[int, ...], stages: int, memory: bool):
    @cache
    def w(layers: int, xi: int, r: int, i: int) -> float:
        """W(l, xi, r, i): first l layers, xi stages, the last on r replicas, devices 1..i."""
        from_end = stages - xi + 1
        if layers < xi or i < xi:  # lines 1-3
            return inf
        if xi == 1 and r == i:  # lines 4-7
            return _stage_seconds(problem, (0, layers, order[:i]), from_end, memory)
        if xi == 1 or r >= i:  # lines 9-11
            return inf
        best = inf
        last_devices = order[i - r : i]
        for cut in range(1, layers):  # line 14
            last = _stage_seconds(problem, (cut, layers, last_devices), from_end, memory)
            for replicas in range(1, i - r + 1):  # line 15
                before = order[i - r - replicas : i - r]
                channel = _channel_seconds(problem, cut, before, last_devices)
                best = min(best, max(w(cut, xi - 1, replicas, i - r), channel, last))
        return best

    return w


def bottleneck(problem: PipelineProblem, stages: Sequence[Stage], memory: bool = True) -> float:
    """SPP's W of given stages: the busiest stage (with all-reduce) or channel, all microbatches."""
    channels = [
        _channel_seconds(problem, left[1], left[2], right[2]) for left, right in pairwise(stages)
    ]
    return max(
        [_stage_seconds(problem, stage, len(stages) - s, memory) for s, stage in enumerate(stages)]
        + channels
    )


def _stage_seconds(problem: PipelineProblem, stage: Stage, from_end: int, memory: bool) -> float:
    needed = min(problem.microbatches, from_end)
    if memory and in_flight_limit(problem, *stage) < needed:
        return inf
    computed = sum(problem.compute_seconds(*stage))
    return problem.microbatches * computed + problem.reduce_seconds(*stage)


def _channel_seconds(
    problem: PipelineProblem, cut: int, senders: Sequence[int], receivers: Sequence[int]
) -> float:
    return problem.microbatches * sum(problem.transfer_seconds(cut, senders, receivers))


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``total`` as a sum of ``parts`` ordered numbers >= 1."""
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, total)))


# --- The joint optimum ----------------------------------------------------------------------


def makespan_problem(problem: PipelineProblem, stages: Sequence[Stage]) -> MakespanProblem | None:
    """The schedule problem of ``stages`` with split replication; None if a stage does not fit."""
    limits = tuple(in_flight_limit(problem, *stage) for stage in stages)
    if min(limits) < 1:
        return None
    compute = [problem.compute_seconds(*stage) for stage in stages]
    sends = [
        problem.transfer_seconds(left[1], left[2], right[2]) for left, right in pairwise(stages)
    ]
    return MakespanProblem(
        microbatches=problem.microbatches,
        forward=tuple(forward for forward, _ in compute),
        backward=tuple(backward for _, backward in compute),
        send_forward=tuple(there for there, _ in sends),
        send_backward=tuple(back for _, back in sends),
        reduce=tuple(problem.reduce_seconds(*stage) for stage in stages),
        in_flight=limits,
    )


def brute_force_joint(problem: PipelineProblem, allow_idle: bool = True) -> float:
    """The least iteration time over all stages, mappings and schedules; inf if nothing fits.

    Contiguous stages on disjoint device sets, any assignment of the devices, split replication,
    limits in flight from memory. Without ``allow_idle`` every device is used (SPP's setting).
    """
    schedules = {
        schedule
        for stages in all_stages(problem, allow_idle)
        if (schedule := makespan_problem(problem, stages)) is not None
    }
    best = inf
    for bound, _, schedule in sorted((_plain_bound(s), i, s) for i, s in enumerate(schedules)):
        if bound >= best:
            break
        best = min(best, brute_force_makespan(schedule))
    return best


def all_stages(problem: PipelineProblem, allow_idle: bool) -> Iterator[list[Stage]]:
    layers, devices = len(problem.chain), len(problem.cluster)
    for count in range(1, min(layers, devices) + 1):
        homes = range(-1 if allow_idle else 0, count)  # -1: the device is idle
        for home in product(homes, repeat=devices):
            groups = [tuple(v for v in range(devices) if home[v] == s) for s in range(count)]
            if not all(groups):
                continue
            for lengths in compositions(layers, count):
                edges = [sum(lengths[:s]) for s in range(count + 1)]
                yield [
                    (start, stop, group)
                    for (start, stop), group in zip(pairwise(edges), groups, strict=True)
                ]


def _plain_bound(problem: MakespanProblem) -> float:
    """No stage does its M microbatches one after another in less, nor is one microbatch faster."""
    one = sum(
        sum(durations)
        for durations in (
            problem.forward, problem.send_forward, problem.backward, problem.send_backward
        )
    )  # fmt: skip
    busy = [
        problem.microbatches * (f + b) + a
        for f, b, a in zip(problem.forward, problem.backward, problem.reduce, strict=True)
    ]
    return max(one, *busy)


# --- SPP's pipeline execution (algorithm 1), and what its theorems promise ------------------


def pe_reference(problem: MakespanProblem) -> float:
    """The makespan of SPP's algorithm 1; limits in flight are not regarded.

    Transfers that become ready at one instant on one channel go in the order of their blocks.
    """
    last = problem.stages - 1
    queues = _pe_order(problem)
    heap: list[tuple[float, int, int]] = []  # (finish, block, microbatch) of what is running
    processed: set[tuple[int, int]] = set()  # (microbatch, block)
    waiting = defaultdict(list)  # transfers per channel
    busy: set[tuple[str, int]] = set()
    reduced = [0.0] * problem.stages

    def start(place: tuple[str, int], queue: list[tuple[int, int]], now: float) -> None:
        if place in busy or not queue:
            return
        m, j = queue[0]
        if j > 0 and (m, j - 1) not in processed:
            return
        queue.pop(0)
        busy.add(place)
        heapq.heappush(heap, (now + _block_seconds(problem, j), j, m))

    start(("stage", 0), queues[0], 0.0)  # line 9
    finished = 0.0
    while heap:  # line 10
        now, j, m = heapq.heappop(heap)
        place = _block_place(problem, j)
        busy.remove(place)
        processed.add((m, j))
        finished = max(finished, now)
        if place[0] == "stage":
            s = place[1]
            if not queues[s]:  # lines 11-13
                reduced[s] = now + problem.reduce[s]
            if j < 4 * last:  # lines 17-19
                channel = _block_place(problem, j + 1)
                waiting[channel].append((m, j + 1))
                start(channel, waiting[channel], now)
            start(place, queues[s], now)  # lines 20-23
        else:
            start(place, waiting[place], now)
            target = _block_place(problem, j + 1)
            start(target, queues[target[1]], now)
    assert not any(queues)
    return max(finished, *reduced)  # line 25


def _pe_order(problem: MakespanProblem) -> list[list[tuple[int, int]]]:
    """Lines 1-8: (microbatch, block) in the order in which every stage runs them.

    In each pass every block takes a microbatch that was available before the pass (as in the
    figure of the cycle schedule); otherwise one pass would carry a microbatch through all blocks.
    """
    blocks = 4 * problem.stages - 3
    available = [list(range(problem.microbatches))] + [[] for _ in range(blocks - 1)]
    order: list[list[tuple[int, int]]] = [[] for _ in range(problem.stages)]
    while any(available):
        for j in [j for j in range(blocks) if available[j]]:
            m = available[j].pop(0)
            if j + 1 < blocks:
                available[j + 1].append(m)
            kind, s = _block_place(problem, j)
            if kind == "stage":
                order[s].append((m, j))
    return order


def _block_place(problem: MakespanProblem, j: int) -> tuple[str, int]:
    """Where block j = 0..4S-4 runs; block 2S-2 is the last stage's forward and backward."""
    mirrored = min(j, 4 * problem.stages - 4 - j)
    return ("channel" if j % 2 else "stage", mirrored // 2)


def _block_seconds(problem: MakespanProblem, j: int) -> float:
    kind, index = _block_place(problem, j)
    middle = 2 * problem.stages - 2
    if j == middle:
        return problem.forward[index] + problem.backward[index]
    if kind == "stage":
        return (problem.forward if j < middle else problem.backward)[index]
    return (problem.send_forward if j < middle else problem.send_backward)[index]


def lemma1_bound(problem: MakespanProblem) -> float:
    """SPP lemma 1: (1 + (4S-4)/M) M C + max A, in the problem's unit of time."""
    stage = max(f + b for f, b in zip(problem.forward, problem.backward, strict=True))
    channels = zip(problem.send_forward, problem.send_backward, strict=True)
    slowest = max([stage] + [there + back for there, back in channels])
    count = problem.microbatches
    return (1 + (4 * problem.stages - 4) / count) * count * slowest + max(problem.reduce)


def theorem1_factor(problem: PipelineProblem) -> float:
    """SPP theorem 1: (2 + (4V-4)/M)(1 + Phi)."""
    stages = 4 * len(problem.cluster) - 4
    return (2 + stages / problem.microbatches) * lemma2_factor(problem)


def lemma2_factor(problem: PipelineProblem) -> float:
    """SPP lemma 2: 1 + Phi, for devices of one kind."""
    count, layers = len(problem.cluster), len(problem.chain)
    pairs = permutations(range(count), 2)
    links = [float(problem.cluster.bandwidth[pair]) for pair in pairs]
    if not links:
        return 1.0
    times = [sum(problem.compute_seconds(i, i + 1, (0,))) for i in range(layers)]
    data = [2 * problem.boundary_bytes(i) for i in range(1, layers)]  # activation and gradient
    gamma = sum(times) / count
    work = max([max(times) * max(links), *data])
    return 1 + work / gamma * (1 / min(links) - 1 / max(links))


def balanced_partitions(
    problem: PipelineProblem, order: Sequence[int]
) -> dict[int, tuple[float, tuple[StageChoice, ...]]]:
    """W and its partition for every feasible number of stages, with devices in ``order``."""
    search = PartitionSearch(BalancedPartition(problem, tuple(order)))
    solved = {stages: search.solve(stages) for stages in search.bound}
    return {
        stages: (balanced.bottleneck_seconds, balanced.stages)
        for stages, balanced in solved.items()
        if balanced is not None
    }
