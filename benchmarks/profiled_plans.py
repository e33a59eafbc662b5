"""Best pipelines by layer profiles beside Sailor's: ``python -m benchmarks profiled_plans``.

Sailor's planner and simulator (eth-easl/sailor cf2c8e3) were run on the same profiles, clusters and
batch, two cores; with its measured coefficients of links, and its own rule of memory.
"""

from rich.progress import track

from benchmarks.profiled import GIB, INPUTS, PER_SERVER, profiles
from benchmarks.report import Table, percent
from benchmarks.spec import BenchSpec
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.parallelism.profiles.cluster import Pool, Route, ServerPools
from stagewright.formulations.parallelism.profiles.pipelines import (
    ProfiledPlan,
    ProfiledProblem,
    ProfiledStage,
    Replica,
    evaluate,
    even_microbatches,
)
from stagewright.solvers.parallelism.profiles.pipelines import profiled_plan

LIMITS = Limits(300)
BATCH = 1024

A100 = Route(2.42e9, 6.04e9)
V100 = Route(1.72e9, 5.79e9)
"""Sailor's measured peaks between servers of one zone: of one device, and of four."""


def cluster(a100: int, v100: int) -> ServerPools:
    """Servers of four devices in one zone."""
    pools = [Pool("A100-40", "us-central1-a", a100 // PER_SERVER, PER_SERVER, 40 * GIB, A100)]
    if v100:
        servers = v100 // PER_SERVER
        pools.append(Pool("V100-16", "us-central1-a", servers, PER_SERVER, 16 * GIB, V100))
    return ServerPools(tuple(pools))


# Samples of a microbatch; of each stage its layers and (pool, tensor degree, number of replicas).
Theirs = tuple[int, tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...]]
Case = tuple[int, int, Theirs, float, float, float]


def _build(case: Case) -> ProfiledProblem:
    a100, v100, *_ = case
    return ProfiledProblem(profiles(), cluster(a100, v100), BATCH)


def sailor_plan(problem: ProfiledProblem, theirs: Theirs) -> ProfiledPlan:
    """Sailor's answer; larger groups take servers first."""
    samples, stages = theirs
    groups = [
        (s, pool, tensor)
        for s, (_, kinds) in enumerate(stages)
        for pool, tensor, count in kinds
        for _ in range(count)
    ]
    free = [[pool.devices] * pool.servers for pool in problem.cluster.pools]
    found: dict[int, Replica] = {}
    for number in sorted(range(len(groups)), key=lambda one: -groups[one][2]):
        _, pool, tensor = groups[number]
        server = next(i for i, left in enumerate(free[pool]) if left >= tensor)
        free[pool][server] -= tensor
        found[number] = Replica(pool, server, tensor)
    of = [[found[i] for i, one in enumerate(groups) if one[0] == s] for s in range(len(stages))]
    return ProfiledPlan(
        samples,
        tuple(
            ProfiledStage(layers, tuple(one)) for (layers, _), one in zip(stages, of, strict=True)
        ),
        even_microbatches(problem.batch // samples, len(of[0])),
    )


def _spread(layers: tuple[int, ...], where: tuple[tuple[int, int], ...], count: int) -> Theirs:
    return 1, tuple(
        (number, ((pool, tensor, count),))
        for number, (pool, tensor) in zip(layers, where, strict=True)
    )


SEVEN = (3, 3, 4, 4, 4, 4, 4)
IN_SEVEN = ((1, 4), (0, 1), (0, 1), (0, 1), (0, 1), (1, 4), (1, 4))

# A100 and V100 devices; Sailor's plan, its iterations/s in Sailor's simulator and its search s; the
# iterations/s of our plan in Sailor's simulator.
STUDY = BenchSpec(
    "profiled_plans",
    _build,
    (
        (32, 0, (8, ((26, ((0, 4, 8),)),)), 0.1251, 0.02, 0.1297),
        (128, 0, (8, ((26, ((0, 4, 32),)),)), 0.4175, 0.05, 0.4175),
        (80, 0, (4, ((26, ((0, 4, 20),)),)), 0.2722, 0.04, 0.2722),
        (32, 96, (2, ((13, ((0, 1, 3), (1, 4, 24))), (13, ((0, 1, 27),)))), 0.17, 0.75, 0.1901),
        (80, 240, _spread(SEVEN, IN_SEVEN, 20), 0.3609, 2.27, 0.4004),
        (128, 384, _spread(SEVEN, IN_SEVEN, 32), 0.5229, 5.32, 0.5358),
    ),
)


def tables(quick: bool) -> list[Table]:
    """Iterations/s of both planners' plans by one evaluator; none without the inputs."""
    if not INPUTS.is_dir():
        return []
    rows: list[tuple[object, ...]] = []
    for case in track(STUDY.cases(quick), "clusters"):
        a100, v100, theirs, simulated, searched, ours_simulated = case
        problem = STUDY.build(case)
        other = evaluate(problem, sailor_plan(problem, theirs))
        found = profiled_plan(problem, LIMITS)
        cost = None if found.estimate is None else 1 / found.estimate.seconds
        rows.append(
            (
                a100,
                v100,
                1 / other.seconds,
                cost,
                1 / found.bound,
                percent(found.gap),
                found.status.value,
                simulated,
                ours_simulated,
                searched,
                found.seconds,
            )
        )
    columns = (
        "A100-40",
        "V100-16",
        "Sailor's plan it/s",
        "our plan it/s",
        "bound it/s",
        "gap",
        "status",
        "Sailor's in its simulator",
        "ours in Sailor's simulator",
        "Sailor's search s",
        "our search s",
    )
    title = f"Plans of OPT-350M, batch {BATCH}, by iterations per second"
    return [Table("profiled_plans", title, columns, tuple(rows))]
