"""Profiled pipelines by plain enumeration, and the time of a pipeline from its list of actions."""

from collections.abc import Iterator
from itertools import combinations, product

from stagewright.formulations.parallelism.profiles.pipelines import (
    ProfiledPlan,
    ProfiledProblem,
    ProfiledStage,
    Replica,
    evaluate,
)
from stagewright.graphs.documents.errors import InvalidPlan


def actions(stage: int, stages: int, microbatches: int) -> list[tuple[str, int, int]]:
    """One forward, one backward: (F or B, 0, microbatch), and transfers (A or G, boundary, it).

    A stage is ahead by as many forwards as stages follow. It sends what it has at once; but the
    activation of a forward that a backward follows waits until that one's gradient is there.
    """
    ahead, last = stages - 1 - stage, stage == stages - 1
    order = [("F", i) for i in range(min(ahead, microbatches))]
    for i in range(microbatches):
        order += [("F", i + ahead)] * (i + ahead < microbatches) + [("B", i)]
    found: list[tuple[str, int, int]] = []
    for kind, i in order:
        if kind == "F":
            found += [("A", stage - 1, i)] * (stage > 0) + [("F", 0, i)]
            found += [("A", stage, i)] * (i < ahead)
        else:
            waiting = not last and i + ahead < microbatches
            found += [("G", stage, i)] * (not last) + [("A", stage, i + ahead)] * waiting
            found += [("B", 0, i)] + [("G", stage - 1, i)] * (stage > 0)
    return found


def finish(forward, backward, transfer, microbatches: int) -> list[float]:
    """Run the actions; a transfer starts when both sides have nothing else left before it."""
    stages = len(forward)
    left = [actions(s, stages, microbatches) for s in range(stages)]
    clock = [0.0] * stages
    while any(left):
        moved = False
        for s in range(stages):
            while left[s] and left[s][0][0] in "FB":
                kind = left[s].pop(0)[0]
                clock[s] += forward[s] if kind == "F" else backward[s]
                moved = True
        for s in range(stages - 1):
            if left[s] and left[s + 1] and left[s][0] == left[s + 1][0]:
                left[s].pop(0), left[s + 1].pop(0)
                clock[s] = clock[s + 1] = max(clock[s], clock[s + 1]) + transfer[s]
                moved = True
        if not moved:
            raise AssertionError(f"deadlock: {[one[:1] for one in left]}")
    return clock


def plans(problem: ProfiledProblem) -> Iterator[ProfiledPlan]:
    """Every plan of the planner's class, on every choice of servers."""
    most = sum(pool.servers * pool.devices for pool in problem.cluster.pools)
    for samples in sorted({one.microbatch_size for one in problem.profiles.measured}):
        total, rest = divmod(problem.batch, samples)
        for data in range(1, min(most, total) + 1 if not rest else 0):
            counts = tuple(total // data + (j < total % data) for j in range(data))
            for number in range(1, min(problem.profiles.layers, most // data) + 1):
                for stages in _divisions(problem, samples, number, data):
                    yield ProfiledPlan(samples, stages, counts)


def _divisions(problem, samples: int, number: int, data: int):
    layers = problem.profiles.layers
    kinds = [
        (p, one.tensor)
        for p, pool in enumerate(problem.cluster.pools)
        for one in problem.profiles.measured
        if (one.device_kind, one.microbatch_size) == (pool.device_kind, samples)
    ]
    for cuts in combinations(range(1, layers), number - 1):
        spans = [b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True)]
        for chosen in product(kinds, repeat=number):
            yield from _placed(problem, spans, chosen, data)


def _placed(problem, spans, chosen, data) -> Iterator[tuple[ProfiledStage, ...]]:
    servers = [range(problem.cluster.pools[pool].servers) for pool, _ in chosen]
    for where in product(*[range_ for range_ in servers for _ in range(data)]):
        yield tuple(
            ProfiledStage(
                span,
                tuple(Replica(pool, server, tensor) for server in where[s * data : (s + 1) * data]),
            )
            for s, (span, (pool, tensor)) in enumerate(zip(spans, chosen, strict=True))
        )


def least_seconds(problem: ProfiledProblem) -> float:
    """The least iteration time of all plans that fit; infinite if there is none."""
    best = float("inf")
    for plan in plans(problem):
        try:
            found = evaluate(problem, plan)
        except InvalidPlan:
            continue
        if found.fits:
            best = min(best, found.seconds)
    return best
