"""Hypothesis strategies for small clusters and the jobs that share them.

Rates are small whole numbers, so that ties occur; a model may not run on a type of accelerator.
"""

from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from random import Random

import numpy as np
from hypothesis import strategies as st

from stagewright.formulations.clusters.allocation import AllocationProblem, problem_of
from stagewright.graphs.workloads.jobs import (
    Entity,
    Job,
    Kind,
    PairRate,
    Rate,
    Throughputs,
    Workload,
    counts_of,
)
from stagewright.graphs.workloads.pool import Accelerator, Pool

SERVERS = ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (6, 3))  # (count, per server)
WEIGHTS = (0.5, 1.0, 1.0, 2.0, 3.0)
OWNERS = ("red", "blue", "green")


@dataclass(frozen=True)
class Case:
    """A problem, and the throughputs that it was made of."""

    workload: Workload
    pool: Pool
    space_sharing: bool
    placement: bool
    problem: AllocationProblem


@st.composite
def random_case(
    draw: st.DrawFn,
    max_jobs: int = 5,
    space_sharing: bool | None = None,
    placement: bool | None = None,
    entities: bool = False,
) -> Case:
    """Some jobs have run for a while, and some have an SLO that may or may not be met.

    Hypothesis draws the sizes, and a seed for all the rest: drawing that costs more than solving.
    """
    types, kinds, jobs = (draw(st.integers(1, most)) for most in (3, 3, max_jobs))
    space_sharing = draw(st.booleans()) if space_sharing is None else space_sharing
    placement = draw(st.booleans()) if placement is None else placement
    rng = Random(draw(st.integers(0, 2**32 - 1)))
    pool = random_pool(rng, types)
    workload = random_workload(rng, pool, kinds, jobs)
    workload = random_owners(rng, workload) if entities else workload
    problem = problem_of(workload, pool, space_sharing=space_sharing, placement=placement)
    times = np.array([[rng.randint(0, 5) for _ in range(jobs)] for _ in range(2)], dtype=float)
    slo = np.array(rng.choices((np.inf, 1.0, 5.0, 20.0), (3, 1, 1, 1), k=jobs))
    problem = replace(
        problem, elapsed_seconds=times[0], isolated_seconds=times[1], deadline_seconds=slo
    )
    return Case(workload, pool, space_sharing, placement, problem)


def random_pool(rng: Random, types: int) -> Pool:
    return Pool(
        tuple(
            Accelerator(name, *rng.choice(SERVERS), rng.choice((0.45, 1.0, 1.46, 2.48)))
            for name in ("v100", "p100", "k80")[:types]
        )
    )


def random_workload(rng: Random, pool: Pool, kinds: int, jobs: int) -> Workload:
    largest = max(accelerator.count for accelerator in pool.accelerators)
    scales = [scale for scale in (1, 1, 1, 2, 3, 4) if scale <= largest]
    several = [counts for counts in ((1, 2), (2, 3), (1, 2, 4)) if counts[-1] <= largest]
    chosen: list[Kind] = []
    for _ in range(kinds):
        counts = rng.choice(several) if several and rng.random() < 0.3 else rng.choice(scales)
        chosen.append((rng.choice("abc"), counts))
    listed = []
    for number in range(jobs):
        model, counts = rng.choice(chosen)
        steps, weight = float(rng.randint(1, 9)), rng.choice(WEIGHTS)
        one, many = (counts, ()) if isinstance(counts, int) else (1, counts)
        listed.append(Job(f"job {number}", model, steps, one, weight, counts=many))
    each = sorted({(kind[0], count) for kind in chosen for count in counts_of(kind)})
    return Workload(tuple(listed), random_throughputs(rng, pool, each))


def use_of(problem: AllocationProblem, job: int, worker: int) -> int:
    """Accelerators that a job takes on a worker type; 0 where it has no such choice."""
    counts = problem.table.kinds[problem.kind[job]][1]
    of_worker = problem.table.workers[worker].count
    if isinstance(counts, int):
        return counts if of_worker is None else 0
    return of_worker if of_worker in counts else 0


def random_owners(rng: Random, workload: Workload) -> Workload:
    """Jobs of three entities, some of which may be parts of a fourth."""
    owners = [
        Entity(
            name,
            rng.choice(WEIGHTS),
            rng.choice(("fairness", "fifo")),
            rng.choice((None, "department")),
        )
        for name in OWNERS
    ]
    jobs = tuple(replace(job, entity=rng.choice(OWNERS)) for job in workload.jobs)
    return replace(workload, jobs=jobs, entities=(Entity("department", 2.0), *owners))


def random_throughputs(rng: Random, pool: Pool, kinds: list[tuple[str, int]]) -> Throughputs:
    """Every kind runs on the largest type; pairs run together on some, no faster than alone."""
    largest = max(pool.accelerators, key=lambda accelerator: accelerator.count).name
    alone, pairs = {}, []
    for model, scale in kinds:
        for name in pool.names:
            rate = rng.randint(1 if name == largest else 0, 12)
            spread = rng.choice((None, rng.randint(0, rate)))
            alone[model, scale, name] = Rate(model, scale, name, rate, spread)
    for (model, scale), (other, other_scale) in combinations_with_replacement(kinds, 2):
        for name in pool.names:
            if scale == other_scale and rng.random() < 0.7:
                mine, others = alone[model, scale, name], alone[other, scale, name]
                together = random_rates(rng, mine.steps_per_second, others.steps_per_second)
                apart = None
                if mine.spread_steps_per_second and others.spread_steps_per_second:
                    apart = random_rates(
                        rng, mine.spread_steps_per_second, others.spread_steps_per_second
                    )
                both = together, rng.choice((None, apart))
                if model == other:  # two jobs of one model cannot be told apart
                    both = tuple(rates and (rates[0], rates[0]) for rates in both)
                pairs.append(PairRate((model, other), scale, name, *both))
    return Throughputs(tuple(alone.values()), tuple(pairs))


def random_rates(rng: Random, most: float, other_most: float) -> tuple[float, float]:
    """Two jobs' rates together, in quarters of those alone; 0 where they do not fit."""
    return rng.randint(0, 4) / 4 * most, rng.randint(0, 4) / 4 * other_most
