"""Jobs that may run on several numbers of accelerators, beside the same jobs on the drawn one.

Gavel's generator and its measured rates (see ``gavel_runs``): 1, 2, 4 or 8 accelerators for the
models that run on several, a cluster of 12 of each of three types, and a restart of a minute.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from time import process_time

import numpy as np

from benchmarks.gavel_runs import DATA, HOUR, MISSING, SEED, SMALL, measured
from benchmarks.report import Table
from stagewright.executor.clusters.rules import ClusterRules
from stagewright.executor.clusters.simulation import simulate_cluster
from stagewright.formulations.clusters.allocation import AllocationProblem, problem_of
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.workloads.jobs import Job, Rate, Throughputs, Workload
from stagewright.graphs.workloads.poisson import DISTRIBUTED, Arrivals
from stagewright.graphs.workloads.pool import Accelerator, Pool, parse_pool
from stagewright.service.clusters.allocating import policy_allocator
from stagewright.solvers.clusters.policies import allocate, policy_named

POLICIES = ("max-min", "finish-time-fairness", "makespan", "sjf", "fifo")
LOADS = (0.5, 1.2, 2.0)  # jobs per hour
JOBS = 200
RESTART = 60.0  # seconds
COUNTS = (1, 2, 4, 8)


def jobs_of(jobs_per_hour: float, count: int, *, elastic: bool) -> tuple[Job, ...]:
    """The generator's jobs of several scales, or with all counts in place of the drawn one."""
    drawn = Arrivals(measured(), HOUR / jobs_per_hour, SEED, distributed=True)
    return tuple(
        replace(job, scale=1, counts=COUNTS, restart_seconds=RESTART)
        if elastic and job.model in DISTRIBUTED
        else replace(job, restart_seconds=RESTART)
        for job in islice(drawn, count)
    )


def hours(jobs: Sequence[Job], policy: str) -> Floats:
    """Completion times in hours, shape (jobs,)."""
    run, rules = policy_allocator(policy), ClusterRules(fill=policy_named(policy).fills)
    return simulate_cluster(jobs, measured(), parse_pool(SMALL), run, rules).durations() / HOUR


def least_mean_hours(jobs: Sequence[Job]) -> float:
    """A bound on the mean completion time under any schedule, restarts left out.

    A job takes at least its time where it is fastest. And all accelerators together are one
    machine on which a job takes the accelerators' time that it needs at least, a type's counted at
    a price: there the shortest remaining time first is optimal for the mean (Schrage, 1968).
    """
    pool = parse_pool(SMALL)
    problem = problem_of(Workload(tuple(jobs), measured()), pool)
    alone = problem.steps / problem.rates.max(axis=1)
    best = float(alone.mean())
    arrival = [job.arrival_seconds for job in jobs]
    speed = problem.rates / np.maximum(problem.uses, 1)
    relative = np.array([np.mean(column[column > 0]) for column in speed.T])
    for power in (0.0, 0.5, 1.0, 1.5):
        price = relative**power
        by_type = np.array([price[problem.table.accelerator == t].max() for t in range(3)])
        cost = by_type[problem.table.accelerator] * problem.uses
        need = np.where(problem.rates > 0, cost / np.maximum(problem.rates, 1e-12), np.inf)
        seconds = problem.steps * need.min(axis=1) / (by_type @ problem.table.counts)
        best = max(best, _shortest_first(arrival, seconds.tolist()))
    return best / HOUR


def _shortest_first(arrival: Sequence[float], seconds: Sequence[float]) -> float:
    """Mean seconds from arrival to end on one machine that serves the least remaining first."""
    left = dict(enumerate(seconds))
    now, total, coming, waiting = 0.0, 0.0, 0, set[int]()
    while waiting or coming < len(arrival):
        while coming < len(arrival) and arrival[coming] <= now:
            waiting.add(coming)
            coming += 1
        following = arrival[coming] if coming < len(arrival) else np.inf
        if not waiting:
            now = following
            continue
        first = min(waiting, key=left.__getitem__)
        ran = min(left[first], following - now)
        now, left[first] = now + ran, left[first] - ran
        if left[first] <= 0:
            waiting.remove(first)
            total += now - arrival[first]
    return total / len(arrival)


def completion_table(quick: bool) -> Table:
    """Mean and 99 % of completion times, elastic beside fixed."""
    rows = []
    for load in LOADS[1:2] if quick else LOADS:
        fixed, elastic = (
            jobs_of(load, 30 if quick else JOBS, elastic=several) for several in (False, True)
        )
        bounds = f"{least_mean_hours(fixed):.2f}", f"{least_mean_hours(elastic):.2f}"
        for policy in POLICIES[:1] if quick else POLICIES:
            found = [hours(jobs, policy) for jobs in (fixed, elastic)]
            means = [one.mean() for one in found]
            tails = [np.percentile(one, 99) for one in found]
            rows.append(
                (load, policy, *(f"{mean:.2f}" for mean in means), f"{means[1] / means[0]:.2f}",
                 *(f"{tail:.1f}" for tail in tails), *bounds)
            )  # fmt: skip
    return Table(
        "elastic",
        f"hours to completion of {JOBS} jobs, fixed and elastic; at least under any schedule",
        ("jobs/h", "policy", "mean, fixed", "elastic", "ratio", "99 %, fixed", "elastic",
         "bound, fixed", "elastic"),
        tuple(rows),
    )  # fmt: skip


def many_jobs(count: int) -> AllocationProblem:
    """Jobs of 400 models, each with two to nine of ten counts, on six types of accelerators."""
    rng, counts = random.Random(SEED), [2**power for power in range(10)]
    names, rates = [f"type{number}" for number in range(6)], []
    for model in range(400):
        base, power = rng.uniform(0.1, 10), rng.uniform(0.7, 0.98)
        for name in names:
            speed = base * rng.uniform(1, 4)
            rates += [
                Rate(str(model), n, name, speed * n**power if rng.random() > 0.05 else 0.0)
                for n in counts
            ]
    jobs = []
    for number in range(count):
        first = rng.randint(0, 5)
        chosen = tuple(counts[first : first + rng.randint(2, 9 - first)])
        model, steps, weight = str(rng.randrange(400)), rng.uniform(1e3, 1e6), rng.choice((1, 1, 2))
        jobs.append(Job(str(number), model, steps, weight=weight, slo_seconds=1e6, counts=chosen))
    pool = Pool(tuple(Accelerator(name, 1024, 8, 1.0 + i) for i, name in enumerate(names)))
    return problem_of(Workload(tuple(jobs), Throughputs(tuple(rates))), pool)


def scale_table(quick: bool) -> Table:
    """CPU seconds of an allocation."""
    problem, rows = many_jobs(64 if quick else 2048), []
    for policy in ("max-min", "makespan", "finish-time-fairness", "fifo", "sjf", "max-throughput",
                   "min-cost", "min-cost-slo"):  # fmt: skip
        began = process_time()
        found = allocate(problem, policy)
        rows.append((policy, f"{process_time() - began:.1f}", f"{found.gap:.1e}"))
    title = "CPU seconds of an allocation: 2,048 jobs, 6 types of accelerators, 10 counts"
    return Table("elastic-scale", title, ("policy", "CPU s", "gap"), tuple(rows))


def tables(quick: bool) -> Iterable[Table]:
    if DATA.is_dir():
        yield completion_table(quick)
    else:
        print(MISSING)
    yield scale_table(quick)
