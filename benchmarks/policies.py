"""How long an allocation takes and how good it is: Gavel's sweep with a peer, and 100,000 jobs.

The jobs of the sweep are those of the public code's ``sweep_policy_runtimes.py``, first trial: n
active jobs, n/4 accelerators of each of three types. The peer is the policy as the thesis writes
it, a variable for every job (and pair) and type, as backend ``cvxpy`` states it, in the same run.
Ours starts from the throughputs too, and ends with checked shares of every job.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from statistics import median
from time import perf_counter

import numpy as np

from benchmarks.gavel_runs import measured
from benchmarks.report import Table
from benchmarks.spec import BenchSpec
from stagewright.formulations.clusters.allocation import AllocationProblem, problem_of
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.workloads.jobs import Entity, PairRate, Rate, Throughputs, Workload
from stagewright.graphs.workloads.poisson import Arrivals
from stagewright.graphs.workloads.pool import Accelerator, Pool, parse_pool
from stagewright.service.clusters.allocating import on_ray
from stagewright.solvers.clusters.partitioned import allocate_partitioned
from stagewright.solvers.clusters.policies import AllocationResult, allocate

TIMES = 5
SAME = 1e-5  # relative; Clarabel's accuracy
PEER_PAIRS = 128  # jobs up to which the peer gets a variable for each pair
WRITTEN_OUT = ("max-min", "makespan", "finish-time-fairness")

# Seconds of the public code's policies (CVXPY with ECOS and GLPK) on a machine of two cores.
GAVEL_SECONDS = {
    ("max-min", False): {128: "0.010", 512: "0.020", 1024: "0.028", 2048: "0.048"},
    ("max-min", True): {128: "0.40", 512: "36, inaccurate", 1024: "over 110"},
    ("hierarchical", False): {
        128: "0.08",
        512: "2.7",
        1024: "0.71, stops early",
        2048: "2.6, stops early",
    },
    ("makespan", False): {128: "0.033", 512: "0.058", 1024: "0.095", 2048: "0.18"},
    ("finish-time-fairness", False): {128: "0.22", 512: "1.1"},
}

# --- The sweep -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A policy for so many jobs, alone or in pairs, on one accelerator or on several."""

    policy: str
    jobs: int
    pairs: bool = False
    distributed: bool = False


POLICIES = (
    ("max-min", False, False),
    ("max-min", True, False),
    ("max-min", False, True),
    ("max-min", True, True),
    ("hierarchical", False, False),
    ("makespan", False, False),
    ("makespan", True, False),
    ("finish-time-fairness", False, False),
    ("finish-time-fairness", True, False),
)
SIZES = (128, 512, 1024, 2048)


def generated(count: int, *, distributed: bool = False, priorities: bool = False) -> Workload:
    """The first jobs of the public generator, all at once."""
    arrivals = Arrivals(measured(), 0.0, 0, distributed=distributed, priorities=priorities)
    jobs = tuple(islice(arrivals, count))
    return Workload(jobs, measured().of((job.model, job.scale) for job in jobs))


def workload(case: Case) -> Workload:
    """The case's jobs; those of ``hierarchical`` belong to five entities of weights 1 to 3."""
    made = generated(case.jobs, distributed=case.distributed)
    if case.policy != "hierarchical":
        return made
    rng = Random(0)
    entities = tuple(Entity(f"entity{n}", float(rng.randint(1, 3))) for n in range(5))
    jobs = tuple(replace(job, entity=rng.choice(entities).name) for job in made.jobs)
    return Workload(jobs, made.throughputs, entities)


SPEC = BenchSpec(
    "policies",
    workload,
    tuple(
        Case(policy, size, pairs, distributed)
        for size in SIZES
        for policy, pairs, distributed in POLICIES
    ),
    few=len(POLICIES),
)


def pool_of(jobs: int) -> Pool:
    return parse_pool(",".join(f"{name}={jobs // 4}" for name in ("v100", "p100", "k80")))


def timed(run: Callable[[], AllocationResult], times: int) -> tuple[AllocationResult, float]:
    """The answer, and the median of its wall seconds."""
    seconds = []
    for _ in range(times):
        began = perf_counter()
        result = run()
        seconds.append(perf_counter() - began)
    return result, median(seconds)


def compare(case: Case, times: int) -> tuple[object, ...]:
    """A row: what the public code took, the peer, ours, and how good ours is proved to be.

    Raises
    ------
    AssertionError
        If the peer's optimum is not ours.
    """
    asked, pool = SPEC.build(case), pool_of(case.jobs)
    result, seconds = timed(
        lambda: allocate(problem_of(asked, pool, space_sharing=case.pairs), case.policy), times
    )
    peer_seconds = None
    if case.policy in WRITTEN_OUT and not (case.pairs and case.jobs > PEER_PAIRS):
        problem = problem_of(asked, pool, space_sharing=case.pairs)
        began = perf_counter()
        optimum = allocate(problem, case.policy, backend="cvxpy").objective
        peer_seconds = perf_counter() - began
        assert optimum is not None
        if result.objective is None or abs(optimum - result.objective) > SAME * optimum:
            raise AssertionError(f"{case}: the peer has {optimum}, we have {result.objective}")
    reference = {} if case.distributed else GAVEL_SECONDS.get((case.policy, case.pairs), {})
    return (
        case.policy + (", pairs" if case.pairs else "") + (", multi" if case.distributed else ""),
        case.jobs,
        reference.get(case.jobs),
        peer_seconds,
        seconds,
        result.objective,
        f"{result.gap:.0e}",
        str(result.status),
    )


def sweep_table(quick: bool) -> Table:
    """Seconds for one allocation."""
    compare(SPEC.sweep[0], 1)  # imports CVXPY
    rows = [compare(case, 1 if quick else TIMES) for case in SPEC.cases(quick)]
    return Table(
        "policies",
        f"Gavel's sweep: seconds for one allocation, ours the median of {TIMES}",
        ("policy", "jobs", "public code, s", "CVXPY + Clarabel, s", "ours, s", "objective", "gap",
         "status"),
        tuple(rows),
    )  # fmt: skip


# --- 100,000 jobs on ten types -------------------------------------------------------------------

MANY, FEW, TYPES, PARTS = 100_000, 2_000, 10, 128
BASE = ("v100", "p100", "k80")
PER_JOB = 0.1  # accelerators


def mixed_cluster(count: int, *, own_rates: bool, pairs: bool = False) -> tuple[Workload, Pool]:
    """``count`` jobs, some on several accelerators, and ten types between and beyond Gavel's three.

    A type's rates are weighted geometric means of the three, by a factor of its own and 20 % of
    noise for each model. With ``own_rates`` every job differs from its model by 20 % on each type:
    no two are alike. With ``pairs``, two models keep of their rates what they keep on the measured
    type that weighs most.
    """
    rng = np.random.default_rng(0)
    made = generated(count, distributed=True)
    mixes, speeds = rng.dirichlet(np.ones(len(BASE)), TYPES), rng.uniform(0.5, 2.0, TYPES)
    kinds = sorted({(job.model, job.scale) for job in made.jobs})
    known = {(r.model, r.scale, r.accelerator): r.steps_per_second for r in measured().alone}
    base = np.array([[known[*kind, name] for name in BASE] for kind in kinds])
    rates = np.exp(np.log(np.maximum(base, 1e-3)) @ mixes.T) * speeds
    rates *= rng.lognormal(0.0, 0.2, rates.shape)
    counts = np.maximum(8, count * PER_JOB * rng.dirichlet(np.full(TYPES, 4.0)))
    names = [f"type{number}" for number in range(TYPES)]
    jobs = made.jobs
    if own_rates:
        position = {kind: number for number, kind in enumerate(kinds)}
        rates = rates[[position[job.model, job.scale] for job in jobs]]
        rates *= rng.lognormal(0.0, 0.2, rates.shape)
        jobs = tuple(replace(job, model=f"{job.model} of job {job.name}") for job in jobs)
        kinds = [(job.model, job.scale) for job in jobs]
    alone = tuple(
        Rate(*kind, name, rate)
        for kind, of_kind in zip(kinds, rates.tolist(), strict=True)
        for name, rate in zip(names, of_kind, strict=True)
    )
    both = _mixed_pairs(known, dict(zip(kinds, rates, strict=True)), mixes) if pairs else ()
    pool = Pool(
        tuple(Accelerator(name, int(size)) for name, size in zip(names, counts, strict=True))
    )
    return Workload(jobs, Throughputs(alone, both)), pool


def _mixed_pairs(
    known: dict[tuple[str, int, str], float], rates: dict[tuple[str, int], Floats], mixes: Floats
) -> tuple[PairRate, ...]:
    found = []
    for number, mix in enumerate(mixes):
        like = BASE[int(mix.argmax())]
        for pair in measured().pairs:
            kinds = [(model, pair.scale) for model in pair.models]
            if pair.accelerator != like or not all(kind in rates for kind in kinds):
                continue
            kept = [
                rate / known[*kind, like] * float(rates[kind][number]) if rate else 0.0
                for kind, rate in zip(kinds, pair.steps_per_second, strict=True)
            ]
            found.append(PairRate(pair.models, pair.scale, f"type{number}", (kept[0], kept[1])))
    return tuple(found)


def scale_table(quick: bool) -> Table:
    """Aggregation where jobs are alike, parts on Ray where they are not; both prove their gap."""
    count = FEW if quick else MANY
    rows = []
    for pairs in (False, True):
        asked, pool = mixed_cluster(count, own_rates=False, pairs=pairs)
        began = perf_counter()
        problem = problem_of(asked, pool, space_sharing=pairs)
        building = perf_counter() - began
        name = "classes of like jobs" + (", pairs" if pairs else "")
        for policy in ("max-min", "makespan"):
            rows.append(_scale_row(name, problem, building, allocate(problem, policy)))
    asked, pool = mixed_cluster(count, own_rates=True)
    began = perf_counter()
    problem = problem_of(asked, pool)
    building = perf_counter() - began
    parts = 4 if quick else PARTS
    for policy in ("max-min", "makespan"):
        result = allocate_partitioned(problem, policy, parts, spread=on_ray)
        name = f"every job its own rates, {parts} parts on Ray"
        rows.append(_scale_row(name, problem, building, result))
    return Table(
        "policies-scale",
        f"{count:,} jobs, some on several accelerators, on {TYPES} types: one allocation",
        ("jobs are", "kinds", "policy", "table, s", "allocation, s", "objective", "bound", "gap"),
        tuple(rows),
    )


def _scale_row(
    name: str, problem: AllocationProblem, building: float, result: AllocationResult
) -> tuple[object, ...]:
    return (
        name,
        len(problem.table.kinds),
        result.policy,
        building,
        result.seconds,
        result.objective,
        result.bound,
        f"{result.gap:.2%}" if result.gap is not None and result.gap > 1e-6 else "proved optimal",
    )


def tables(quick: bool) -> list[Table]:
    """The sweep and the large cluster."""
    return [sweep_table(quick), scale_table(quick)]
