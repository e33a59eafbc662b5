"""Jobs that may run on several numbers of accelerators, beside the same jobs on the drawn one.

Gavel's models and measured rates (see ``gavel_runs``), with its durations or those of the published
``LOADS``: 1, 2, 4 or 8 accelerators for the models that run on several, a cluster of 12 of each of
three types, and a restart of a minute. The published loads ask for as many GPU-hours an hour as
nine tenths of the accelerators, were all V100s, give; as many of their jobs last minutes, there is
an allocation for every round in which jobs came or went.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from time import process_time

import numpy as np
from matplotlib.figure import Figure

from benchmarks.gavel_runs import DATA, HOUR, MISSING, SEED, SMALL, measured
from benchmarks.report import FIGURES, Table
from stagewright.executor.clusters.rounds import Mechanism
from stagewright.executor.clusters.simulation import simulate_cluster
from stagewright.executor.clusters.timeline import ClusterRules
from stagewright.formulations.clusters.allocation import AllocationProblem, problem_of
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.workloads.jobs import Job, Rate, Throughputs, Workload
from stagewright.graphs.workloads.poisson import DISTRIBUTED, LOADS, Arrivals
from stagewright.graphs.workloads.pool import Accelerator, Pool, parse_pool
from stagewright.service.clusters.allocating import policy_allocator
from stagewright.solvers.clusters.policies import allocate, policy_named

POLICIES = ("max-min", "finish-time-fairness", "makespan", "sjf", "fifo")
GAVEL = (0.5, 1.2, 2.0)  # jobs per hour
OFFERED = 0.9
JOBS = 200
RESTART = 60.0  # seconds
ROUND = 360.0
RESET = 1920.0  # least time between two allocations of Gavel's
COUNTS = (1, 2, 4, 8)
SCALED = (
    "max-min", "water-filling", "makespan", "finish-time-fairness", "fifo", "sjf",
    "max-throughput", "min-cost", "min-cost-slo",
)  # fmt: skip
LARGE = "v100=11x8,p100=10x8,k80=11x8"
WEEK = 7 * 24 * HOUR
TITLE = f"hours to completion of {JOBS} jobs, fixed and elastic; at least under any schedule"
COLUMNS = (
    "load", "jobs/h", "policy", "mean, fixed", "elastic", "ratio", "99 %, fixed", "elastic",
    "bound, fixed", "elastic", "moves, fixed", "elastic",
)  # fmt: skip
Row = tuple[object, ...]


def published_per_hour(load: str) -> float:
    """Jobs per hour that ask for the ``OFFERED`` part of the cluster."""
    rates = {(one.model, one.scale, one.accelerator): one for one in measured().alone}
    jobs = islice(Arrivals(measured(), 0.0, SEED, distributed=True, load=load), JOBS)
    asked = sum(
        job.scale * job.steps / rates[job.model, job.scale, "v100"].steps_per_second for job in jobs
    )
    return OFFERED * sum(one.count for one in parse_pool(SMALL).accelerators) * JOBS * HOUR / asked


def jobs_of(
    load: str | None, jobs_per_hour: float, count: int, *, elastic: bool
) -> tuple[Job, ...]:
    """The generator's jobs of several scales, or with all counts in place of the drawn one."""
    drawn = Arrivals(measured(), HOUR / jobs_per_hour, SEED, distributed=True, load=load)
    return _with_counts(islice(drawn, count), elastic=elastic)


def _with_counts(drawn: Iterable[Job], *, elastic: bool) -> tuple[Job, ...]:
    return tuple(
        replace(job, scale=1, counts=COUNTS, restart_seconds=RESTART)
        if elastic and job.model in DISTRIBUTED
        else replace(job, restart_seconds=RESTART)
        for job in drawn
    )


def hours(jobs: Sequence[Job], policy: str, reset: float) -> tuple[Floats, float]:
    """Completion times in hours, shape (jobs,), and how often a job is moved on average."""
    run = policy_allocator(policy)
    rules = ClusterRules(reset_seconds=reset, fill=policy_named(policy).fills)
    pool = parse_pool(SMALL)
    found = simulate_cluster(jobs, measured(), pool, run, rules, keep_assignments=True)
    starts = sum(not one.renewed for each in found.rounds for one in each.assignments)
    return found.durations() / HOUR, starts / len(jobs) - 1


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


def completion_rows(load: str | None, jobs_per_hour: float, quick: bool) -> Iterator[Row]:
    """Mean and 99 % of completion times of each policy, elastic beside fixed."""
    fixed, elastic = (
        jobs_of(load, jobs_per_hour, 30 if quick else JOBS, elastic=several)
        for several in (False, True)
    )
    bounds = f"{least_mean_hours(fixed):.2f}", f"{least_mean_hours(elastic):.2f}"
    reset = RESET if load is None else ROUND
    for policy in POLICIES[:1] if quick else POLICIES:
        found = [hours(jobs, policy, reset) for jobs in (fixed, elastic)]
        means = [one.mean() for one, _ in found]
        tails = [np.percentile(one, 99) for one, _ in found]
        yield (
            load or "gavel", f"{jobs_per_hour:.3g}", policy, *(f"{mean:.2f}" for mean in means),
            f"{means[1] / means[0]:.2f}", *(f"{tail:.1f}" for tail in tails), *bounds,
            *(f"{moves:.1f}" for _, moves in found),
        )  # fmt: skip


def completion_table(quick: bool) -> Table:
    """All loads and policies."""
    cases: list[tuple[str | None, float]] = [(None, rate) for rate in GAVEL]
    cases += [(load, published_per_hour(load)) for load in LOADS]
    rows = [
        row for load, rate in (cases[1:2] if quick else cases)
        for row in completion_rows(load, rate, quick)
    ]  # fmt: skip
    return Table("elastic", TITLE, COLUMNS, tuple(rows))


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
    pool = Pool(tuple(Accelerator(name, 1672, 8, 1.0 + i) for i, name in enumerate(names)))
    return problem_of(Workload(tuple(jobs), Throughputs(tuple(rates))), pool)


def scale_table(quick: bool) -> Table:
    """CPU seconds of an allocation, and of the first round that carries it out."""
    problem, rows = many_jobs(64 if quick else 2048), []
    for policy in SCALED:
        began = process_time()
        found = allocate(problem, policy)
        allocated = process_time()
        mechanism = Mechanism(problem.table, ROUND, fill=policy_named(policy).fills)
        if found.allocation is not None:
            mechanism.reset(problem, found.allocation, range(len(problem)))
            mechanism.schedule()
        ended = process_time()
        rows.append(
            (policy, f"{allocated - began:.1f}", f"{ended - allocated:.1f}", f"{found.gap:.1e}")
        )
    title = (
        "CPU seconds of a decision: 2,048 jobs, 6 types of 1,672 accelerators each, 10 counts; "
        "the allocation, and the round that carries it out"
    )
    return Table("elastic-scale", title, ("policy", "allocation", "round", "gap"), tuple(rows))


def week_table(quick: bool) -> Table:
    """CPU seconds of a simulated week of the load of Sia."""
    drawn = Arrivals(measured(), WEEK / 2000, SEED, distributed=True, load="sia")
    jobs, rows = _with_counts(islice(drawn, 20 if quick else 2000), elastic=True), []
    for policy in POLICIES[:1] if quick else POLICIES:
        run, rules = policy_allocator(policy), ClusterRules(fill=policy_named(policy).fills)
        began = process_time()
        found = simulate_cluster(jobs, measured(), parse_pool(LARGE), run, rules)
        spent = process_time() - began
        mean = found.durations().mean() / HOUR
        rows.append((policy, f"{spent:.1f}", len(found.rounds), len(found.resets), f"{mean:.2f}"))
    title = (
        "CPU seconds to simulate until the end of 2,000 jobs that arrive in a week, on 256 "
        "accelerators with rounds of 6 minutes"
    )
    columns = ("policy", "CPU s", "rounds", "allocations", "mean completion, h")
    return Table("elastic-week", title, columns, tuple(rows))


def draw(rows: Sequence[Row]) -> None:
    """Draw the mean completion times of each load over their least, fixed beside elastic."""
    loads = list(dict.fromkeys((str(row[0]), str(row[1])) for row in rows))
    figure = Figure(figsize=(11, 3.4), dpi=100, layout="constrained")
    all_axes = figure.subplots(1, len(loads), sharey=True)
    for axes, load in zip(all_axes, loads, strict=True):
        for place, row in enumerate(one for one in rows if (one[0], one[1]) == load):
            fixed, elastic, bounds = float(str(row[3])), float(str(row[4])), row[-2:]
            axes.plot((elastic, fixed), (place, place), color="0.7", zorder=1)
            axes.plot(fixed, place, "o", color="C0", label="" if place else "fixed")
            axes.plot(elastic, place, "o", color="C1", label="" if place else "elastic")
        for bound, colour in zip(bounds, ("C0", "C1"), strict=True):
            axes.axvline(float(str(bound)), color=colour, linestyle=":")
        axes.set(xlabel="mean, h", xlim=(0, 1.1 * axes.get_xlim()[1]))
        axes.set_title(f"{load[0]}\n{load[1]} jobs/h", fontsize="medium")
        axes.set_yticks(range(len(POLICIES)), POLICIES)
        axes.grid(alpha=0.3)
    all_axes[0].invert_yaxis()
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(FIGURES / "elastic.png")


def tables(quick: bool) -> Iterable[Table]:
    if DATA.is_dir():
        completion = completion_table(quick)
        if not quick:
            draw(completion.rows)
        yield completion
        yield week_table(quick)
    else:
        print(MISSING)
    yield scale_table(quick)
