"""Jobs on a Ray of this machine."""

from pathlib import Path
from typing import Any

from stagewright.executor.clusters.rates import ClusterJob, TrainingFunction
from stagewright.executor.clusters.report import ClusterReport
from stagewright.executor.clusters.runtime import run_cluster
from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem
from stagewright.formulations.forms.answers import Limits
from stagewright.graphs.workloads.jobs import Job, Rate, Throughputs
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.solvers.clusters.policies import max_min

SECONDS = {"v100": 0.005, "k80": 0.01}


RATES = Throughputs(
    tuple(Rate("walk", scale, name, 1 / SECONDS[name]) for scale in (1, 2) for name in SECONDS)
)


ROUND = 0.5


def max_min_fair(problem: AllocationProblem) -> Allocation:
    found = max_min.solve(problem, Limits()).allocation
    assert found is not None
    return found


def job(
    name: str, steps: int, program: TrainingFunction, scale: int = 1, **more: Any
) -> ClusterJob:
    return ClusterJob(Job(name, "walk", steps, scale, **more), program)


def run(folder: Path, *jobs: ClusterJob, **options: Any) -> ClusterReport:
    options = {"round_seconds": ROUND, "grace_seconds": 10.0, "retries": 2} | options
    pool = parse_pool(options.pop("pool", "v100=2,k80=2"))
    rates = options.pop("rates", RATES)
    return run_cluster(jobs, rates, pool, max_min_fair, folder=folder, **options)
