"""Plans of thousands of devices: time, memory, and the proved gap.

Every instance is planned by ``auto`` in a process of its own, from the cluster's file to that of
the plan, until the gap in the plan's class is at most 1 % or the time is over; then the file is
checked.
"""

import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.report import Table
from stagewright.formulations.checking.check import require_valid
from stagewright.formulations.forms.answers import Limits, Progress
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import load_plan, save_plan
from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.machines.cluster import (
    Cluster,
    Link,
    load_cluster,
    save_cluster,
    uniform_servers,
)
from stagewright.graphs.machines.topology import uniform_racks
from stagewright.graphs.models.chain import Chain
from stagewright.solvers.planners.steps.warm_up import compile_kernels
from stagewright.solvers.planning import plan

GB = 1e9
GAP = 0.01
COLUMNS = (
    "model", "devices", "links GB/s", "M", "first plan s", "plan s", "ms", "bound ms", "gap %",
    "file MB", "check s", "memory GB",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Instance:
    """A model on servers of 8, of one rack if ``shape`` has no number of racks."""

    model: str
    chain: Callable[[], Chain]
    shape: tuple[int, ...]
    gigabytes: tuple[float, ...]  # per second, of every level of links from the inner one
    microbatches: int
    limit_seconds: float

    def cluster(self) -> Cluster:
        """The cluster, with latencies of 1, 5 and 10 us."""
        links = [
            Link(width * GB, latency)
            for width, latency in zip(self.gigabytes, (1e-6, 5e-6, 1e-5), strict=False)
        ]
        if len(self.shape) == 2:
            return uniform_servers(self.shape[0], self.shape[1], links[0], links[1])
        racks, servers, devices = self.shape
        return uniform_racks(racks, servers, devices, (links[0], links[1], links[2]))


BERT = ("bert-large, 512 samples", partial(analytic_model, "bert-large", 512))
GPT = (
    "gpt, layers 48, hidden 2048, heads 16, 256 samples",
    partial(analytic_model, "gpt", 256, layers=48, hidden=2048, heads=16),
)
TWO_LEVELS, THREE_LEVELS = (130, 12.5), (300, 50, 12.5)
INSTANCES = (
    Instance(*BERT, (256, 8), TWO_LEVELS, 32, 60.0),
    Instance(*BERT, (512, 8), TWO_LEVELS, 32, 120.0),
    Instance(*BERT, (1250, 8), TWO_LEVELS, 32, 300.0),
    Instance(*BERT, (1250, 8), TWO_LEVELS, 64, 300.0),
    Instance(*BERT, (125, 10, 8), THREE_LEVELS, 32, 300.0),
    Instance(*GPT, (1250, 8), TWO_LEVELS, 64, 300.0),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one instance: seconds of wall time, bytes, and the plan's certificate."""

    first_seconds: float
    plan_seconds: float
    check_seconds: float
    cost_seconds: float
    bound_seconds: float
    gap: float
    file_bytes: int
    memory_bytes: float


def tables(quick: bool) -> list[Table]:
    """A row per instance; the first for a tenth of its time if ``quick``."""
    few, share = (INSTANCES[:1], 0.1) if quick else (INSTANCES, 1.0)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        rows = [_row(one, pool.submit(measure, one, share).result()) for one in few]
    title = f"Thousands of devices: `auto` until a gap of {GAP:.0%}, 2 threads"
    return [Table("scale", title, COLUMNS, tuple(rows))]


def measure(instance: Instance, share: float) -> Measured:
    """Plan and check the instance in this process, in a share of its time."""
    compile_kernels("auto")
    with TemporaryDirectory() as folder:
        machines, file = Path(folder, "cluster.json"), Path(folder, "plan.json")
        chain = instance.chain()
        save_cluster(instance.cluster(), machines)
        began = perf_counter()
        problem = PipelineProblem(chain, load_cluster(machines), instance.microbatches)
        found: list[float] = []

        def note(progress: Progress) -> None:
            found.append(perf_counter() - began)

        limits = Limits(seconds=share * instance.limit_seconds, gap=GAP)
        result = plan(problem, "auto", limits, note)
        assert result.plan is not None
        save_plan(result.plan, file)
        planned = perf_counter() - began
        began = perf_counter()
        problem = PipelineProblem(chain, load_cluster(machines), instance.microbatches)
        require_valid(problem, load_plan(file))
        checked = perf_counter() - began
        size = file.stat().st_size
    assert result.cost is not None
    assert result.bound is not None
    assert result.gap is not None
    memory = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Measured(found[0], planned, checked, result.cost, result.bound, result.gap, size, memory)


def _row(one: Instance, measured: Measured) -> tuple[object, ...]:
    return (
        one.model, "x".join(map(str, one.shape)), " / ".join(f"{x:g}" for x in one.gigabytes),
        one.microbatches, f"{measured.first_seconds:.1f}", f"{measured.plan_seconds:.0f}",
        f"{1e3 * measured.cost_seconds:.5g}", f"{1e3 * measured.bound_seconds:.5g}",
        f"{100 * measured.gap:.2f}", f"{measured.file_bytes / 1e6:.0f}",
        f"{measured.check_seconds:.0f}", f"{measured.memory_bytes / 1e9:.1f}",
    )  # fmt: skip
