"""Simulations for ``gavel.py``: one case, and many of them in processes.

Traces, throughputs and the published points are read from the folder ``shared/data/gavel`` beside
the checkout and are not part of the repository. A full run takes most of an hour of one core.
"""

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import islice
from math import nan
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean
from time import perf_counter, process_time
from typing import Literal

from rich.progress import track

from stagewright.executor.clusters.simulation import simulate_cluster
from stagewright.executor.clusters.timeline import ClusterRules, ClusterTimeline
from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.gavel import read_throughputs, read_trace
from stagewright.graphs.workloads.jobs import Job, Throughputs
from stagewright.graphs.workloads.poisson import MODELS, SLO_FACTORS, Arrivals
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.solvers.clusters.policies import allocate, policy_named

DATA = Path(__file__).parents[2] / "shared" / "data" / "gavel"
MISSING = f"skipped: Gavel's data are not in {Path(*DATA.parts[-3:])} beside the checkout"
PROCESSES = 2
SEED = 0
HOUR = 3600.0
DAY = 24 * HOUR

LARGE = "v100=36,p100=36,k80=36"
PHYSICAL = "v100=8,p100=16,k80=24"
SMALL = "v100=12,p100=12,k80=12"
PRICED = "v100=36@2.48,p100=36@1.46,k80=36@0.45"

# --- A simulation --------------------------------------------------------------------------------

Kind = Literal["single", "multi", "priorities", "cost"]


@dataclass(frozen=True, slots=True)
class Case:
    """A policy on a trace: a file's, or the generator's jobs of a ``kind``.

    ``jobs_per_hour`` None lets all jobs come at once; ``jobs`` are measured, FIRST and END.
    """

    policy: str
    space_sharing: bool = False
    jobs_per_hour: float | None = None
    jobs: tuple[int, int] = (0, 0)
    kind: Kind = "single"
    trace: str | None = None
    pool: str = LARGE
    round_seconds: float = 360.0
    ideal: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case: of each measured job its completion time, weight and fairness rho."""

    hours: tuple[float, ...]
    weights: tuple[float, ...]
    fairness: tuple[float, ...]
    makespan_hours: float
    dollars: float | None
    slo_violations: int
    wall_seconds: float
    cpu_seconds: float

    @property
    def mean_hours(self) -> float:
        """Average job completion time."""
        return fmean(self.hours)

    def mean_hours_of(self, weight: float) -> float:
        """Average completion time of the jobs of a weight, nan if there are none."""
        pairs = zip(self.hours, self.weights, strict=True)
        chosen = [hours for hours, of_job in pairs if of_job == weight]
        return fmean(chosen) if chosen else nan


@cache
def measured() -> Throughputs:
    return read_throughputs(DATA / "simulation_throughputs.json")


def cost_jobs(jobs_per_hour: float, count: int) -> tuple[Job, ...]:
    """Jobs of the cost study: ResNet-50 and A3C in equal parts, of half a day to eight on a V100.

    Its SLOs are equally likely. The thesis does not say how the jobs arrive, nor the batch sizes.
    """
    draw = Random(SEED)
    rates = {
        rate.model: rate.steps_per_second
        for rate in measured().alone
        if (rate.accelerator, rate.scale) == ("v100", 1)
    }
    resnets = [model for model in MODELS if model.startswith("ResNet-50")]
    jobs, arrival = [], 0.0
    for number in range(count):
        model = draw.choice(resnets) if draw.random() < 0.5 else "A3C"
        duration = draw.choice((0.5, 1.0, 2.0, 4.0, 8.0)) * DAY
        slo = draw.choice([factor for _, factor in SLO_FACTORS]) * duration
        jobs.append(
            Job(
                str(number),
                model,
                duration * rates[model],
                arrival_seconds=arrival,
                slo_seconds=slo,
            )
        )
        arrival += draw.expovariate(jobs_per_hour / HOUR)
    return tuple(jobs)


def jobs_of(case: Case) -> Iterable[Job]:
    """The case's jobs: without end if they come one by one."""
    if case.trace is not None:
        return read_trace(DATA / "traces" / case.trace)
    if case.kind == "cost":
        return cost_jobs(case.jobs_per_hour or 0.0, case.jobs[1])
    gap = HOUR / case.jobs_per_hour if case.jobs_per_hour else 0.0
    coming = Arrivals(
        measured(),
        gap,
        SEED,
        distributed=case.kind == "multi",
        priorities=case.kind == "priorities",
    )
    return coming if case.jobs_per_hour else tuple(islice(coming, case.jobs[1]))


def simulate(case: Case) -> Outcome:
    """Run a case as ``stagewright simulate-cluster`` does."""
    policy = policy_named(case.policy)
    rules = ClusterRules(
        case.round_seconds,
        fill=policy.fills,
        shuffle_seed=None if policy.aware else SEED + 5,
        space_sharing=case.space_sharing,
        ideal=case.ideal,
    )
    wall, cpu = perf_counter(), process_time()
    found = simulate_cluster(
        jobs_of(case),
        measured(),
        parse_pool(case.pool),
        lambda problem: allocation_by(case.policy, problem),
        rules,
        window=range(*case.jobs) if case.jobs_per_hour else None,
    )
    return outcome(case, found, perf_counter() - wall, process_time() - cpu)


def allocation_by(policy: str, problem: AllocationProblem) -> Allocation:
    found = allocate(problem, policy).allocation
    if found is None:
        raise InputError(f"policy {policy!r} has no allocation for {len(problem)} jobs")
    return found


def outcome(case: Case, found: ClusterTimeline, wall: float, cpu: float) -> Outcome:
    window = range(*case.jobs) if case.jobs[1] else None
    chosen = found.jobs if window is None else found.jobs[window.start : window.stop]
    return Outcome(
        tuple(round(float(seconds) / HOUR, 6) for seconds in found.durations(window)),
        tuple(one.job.weight for one in chosen),
        tuple(round(float(rho), 5) for rho in found.fairness(window)),
        found.makespan_seconds / HOUR,
        found.dollars,
        found.slo_violations,
        wall,
        cpu,
    )


# --- Many simulations ----------------------------------------------------------------------------

Outcomes = dict[Case, Outcome]


def study(cases: Iterable[Case]) -> Outcomes:
    """All cases, each once, in processes of one thread each."""
    wanted = tuple(dict.fromkeys(cases))
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        finished = track(pool.map(simulate, wanted), "gavel", total=len(wanted))
        return dict(zip(wanted, finished, strict=True))
