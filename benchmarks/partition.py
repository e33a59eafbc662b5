"""Time and peak memory of device ordering and partition (RDO and PRM) on large clusters.

Every case runs in a process of its own. The kernels are compiled when they are first used and
kept on disk; the cases are timed with the compiled kernels loaded, and what the first use on a
machine costs is a figure of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import perf_counter, process_time
from typing import Any, TypeVar

import numpy as np

from benchmarks.report import Table
from benchmarks.spp import bert
from stagewright.formulations.forms.answers import Limits, silent
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.graphs.models.chain import Chain
from stagewright.solvers.planners.spp import StageCountSearch, search_stage_counts
from stagewright.solvers.planning import plan

T = TypeVar("T")

SEED = 7
LIMITS = Limits(seconds=600)


SAMPLES = 16  # of GPT's microbatches, so that several devices can share one


@dataclass(frozen=True, slots=True)
class Case:
    """An instance with its targets; ``uneven`` draws every layer's time from half to 1.5 times."""

    name: str
    layers: int
    servers: int
    gpus: int
    uneven: bool
    seconds: float
    gigabytes: float | None = None


CASES = (
    Case("bert-large", 27, 8, 4, False, 0.5),
    Case("gpt", 100, 32, 8, False, 10, 2),
    Case("gpt, uneven", 100, 32, 8, True, 10, 2),
    Case("gpt, uneven", 200, 128, 8, True, 60),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One case: (wall, CPU) seconds of its parts, peaks above what was there before, answers."""

    order_seconds: tuple[float, float]
    search_seconds: tuple[float, float]
    plan_seconds: tuple[float, float]
    search_bytes: float
    plan_bytes: float
    cost: float | None
    gap: float | None
    stages: int
    notes: tuple[str, ...]


def problem(case: Case) -> PipelineProblem:
    """BERT-large on the simulated cluster of SPP V-B; GPT on NVLink servers of A100."""
    if case.name == "bert-large":
        return bert()
    chain = analytic_model("gpt", SAMPLES, "a100-80gb", layers=case.layers - 2)
    cluster = uniform_servers(
        case.servers, case.gpus, Link(300e9, 3e-6), Link(25e9, 1e-5), kind="a100-80gb",
        memory_bytes=80e9,
    )  # fmt: skip
    return PipelineProblem(_uneven(chain) if case.uneven else chain, cluster, 64)


def _uneven(chain: Chain) -> Chain:
    factors = np.random.default_rng(SEED).uniform(0.5, 1.5, len(chain))
    layers = []
    for layer, factor in zip(chain.layers, factors, strict=True):
        cost = layer.costs[0]
        slower = replace(
            cost,
            forward_seconds=cost.forward_seconds * float(factor),
            input_gradient_seconds=None,
            weight_gradient_seconds=None,
            backward_seconds=cost.total_backward_seconds * float(factor),
        )
        layers.append(replace(layer, costs=(slower,)))
    return replace(chain, layers=tuple(layers))


def measure(number: int) -> Measured:
    """Case ``number`` in this process, with the kernels loaded by a small case first."""
    plan(bert(microbatches=2, servers=(2, 2)), "spp", LIMITS)
    asked = problem(CASES[number])
    before = peak_bytes()
    _, ordering = _timed(lambda: recursive_device_order(asked.cluster))
    answer, searching = _timed(lambda: search_stage_counts(asked, LIMITS, silent))
    during = peak_bytes()
    assert isinstance(answer, StageCountSearch)
    result, planning = _timed(lambda: plan(asked, "spp", LIMITS))
    return Measured(
        ordering, searching, planning, during - before, peak_bytes() - before, result.cost,
        result.gap, len(result.plan.stages) if result.plan else 0, answer.notes,
    )  # fmt: skip


def _timed(run: Callable[[], T]) -> tuple[T, tuple[float, float]]:
    began, worked = perf_counter(), process_time()
    answer = run()
    return answer, (perf_counter() - began, process_time() - worked)


def peak_bytes() -> float:
    """The process's peak resident memory.

    Linux hands a parent's peak on to its children in ``ru_maxrss``, so ``VmHWM`` is read there.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return float(line.split()[1]) * 1024
    return float(getrusage(RUSAGE_SELF).ru_maxrss)


def first_use_seconds() -> float:
    """What the first plan on a machine takes, when every kernel must be compiled."""
    with tempfile.TemporaryDirectory() as empty:
        return float(_run("first", {"NUMBA_CACHE_DIR": empty})["seconds"])


def measured(number: int) -> Measured:
    """Case ``number`` in a fresh process."""
    return Measured(**_run(str(number), {}))


def _run(argument: str, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.partition", argument],
        env={**os.environ, **environment}, cwd=Path(__file__).parents[1], check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def time_table(numbers: list[int]) -> list[Table]:
    """Time and memory beside the targets; and what the searches found."""
    times, quality = [], []
    for number in numbers:
        case, got = CASES[number], measured(number)
        size = f"{case.layers} x {case.servers * case.gpus}"
        memory = f" and {case.gigabytes:g} GB" if case.gigabytes else ""
        times.append(
            (
                case.name,
                size,
                f"{case.seconds:g} s{memory}",
                *(_both(s) for s in (got.order_seconds, got.search_seconds, got.plan_seconds)),
                f"{got.search_bytes / 1e6:.0f}",
                f"{got.plan_bytes / 1e6:.0f}",
            )
        )
        gap = None if got.gap is None else f"{got.gap:.1%}"
        quality.append((case.name, size, got.stages, got.cost, gap, "; ".join(got.notes)))
    return [
        Table(
            "partition-time",
            "Device ordering and partition: time and memory",
            ("model", "layers x devices", "target", "RDO s (CPU)", "search s (CPU)",
             "whole plan s (CPU)", "search MB", "whole plan MB"),
            tuple(times),
        ),
        Table(
            "partition-quality",
            "What the searches found and proved",
            ("model", "layers x devices", "stages", "s per iteration", "certified gap", "search"),
            tuple(quality),
        ),
    ]  # fmt: skip


def _both(seconds: tuple[float, float]) -> str:
    wall, cpu = seconds
    return f"{wall:.2f} ({cpu:.2f})"


def tables(quick: bool) -> list[Table]:
    """The small case alone, or all; and the cost of the first use."""
    found = time_table([0] if quick else list(range(len(CASES))))
    if not quick:
        row = (
            "compile every kernel, and plan BERT-large on 4 devices",
            f"{first_use_seconds():.1f}",
        )
        found.append(Table("partition-first-use", "First use on a machine", ("what", "s"), (row,)))
    return found


if __name__ == "__main__":
    if sys.argv[1] == "first":
        started = perf_counter()
        plan(bert(microbatches=2, servers=(2, 2)), "spp", LIMITS)
        print(json.dumps({"seconds": perf_counter() - started}))
    else:
        print(json.dumps(asdict(measure(int(sys.argv[1])))))
