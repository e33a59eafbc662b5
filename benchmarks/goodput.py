"""Published interruptions of long trainings, beside the goodput of the model and of simulated runs.

* Llama 3 405B: The Llama 3 Herd of Models (arXiv 2407.21783), section 3.3.4: 466 interruptions in
  54 days on 16,384 GPUs, 419 of them unexpected, more than 90 % effective training time; section
  3.3.1: a store of 2 TB/s sustained; table 4: 400 TFLOP/s per GPU, 16M tokens per batch.
* OPT-175B: Zhang et al. (arXiv 2205.01068), section 2.5: at least 35 manual restarts and an
  estimate of 70 automatic ones in two months on 992 GPUs at 147 TFLOP/s; batches of 2M tokens. Its
  store and its effective time are not printed.
* MegaScale: Jiang et al. (NSDI 2024), sections 4 and 6.3: more than 100 recoveries in several weeks
  on 12,288 GPUs, less than 10 minutes to detect and diagnose, caught up within 15 more, more than
  90 % effective. The model and the store of that run are not printed: its 175B model is taken, with
  6.34 s per iteration (table 2).

Of ours the restart is a parameter, for no paper prints it as a time of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.report import Table
from stagewright.executor.simulation.failures import simulated_goodput
from stagewright.formulations.parallelism.goodput import Failures, RunSize, goodput

DAY = 86_400.0
STATE_BYTES = 14
"""Of a parameter: the weight in bf16, its master and two moments in fp32."""
_DEFAULT = 2e9
"""Bytes per second of a server of eight where the store is not printed."""


@dataclass(frozen=True, slots=True)
class Published:
    """A run as printed; ``store`` in bytes per second, None if that is not printed."""

    name: str
    gpus: int
    days: float
    failures: int
    parameters: float
    iteration_seconds: float
    store: float | None
    effective: str


RUNS = (
    Published("Llama 3 405B", 16_384, 54, 419, 405e9, 6.2, 2e12, "over 90 %"),
    Published("OPT-175B", 992, 60, 105, 175e9, 14.4, None, "not printed"),
    Published("MegaScale, 4 weeks", 12_288, 28, 100, 175e9, 6.34, None, "over 90 %"),
    Published("MegaScale, 8 weeks", 12_288, 56, 100, 175e9, 6.34, None, "over 90 %"),
)
RESTARTS = (5, 15, 25)
"""Minutes."""


def tables(quick: bool) -> Iterator[Table]:
    """One table with a row for every run."""
    yield Table(
        "goodput",
        "Published interruptions, and goodput by restart (minutes); simulated with the middle one",
        (
            "run", "GPUs", "hours of a GPU between failures", "hours of the run", "interval, min",
            "checkpoint, s", *(f"goodput, {minutes} min" for minutes in RESTARTS), "simulated",
            "printed",
        ),
        tuple(_row(run, 4 if quick else 40) for run in RUNS),
    )  # fmt: skip


def _row(run: Published, simulations: int) -> tuple[object, ...]:
    mtbf = run.days * DAY * run.gpus / run.failures
    store = run.store or _DEFAULT * run.gpus / 8
    stop = run.parameters * STATE_BYTES / store
    found = []
    for minutes in RESTARTS:
        size = RunSize(run.gpus, run.iteration_seconds, stop, 0.0, 60.0 * minutes + stop)
        failures = Failures(mtbf, store * 8 / run.gpus, restart_seconds=60.0 * minutes)
        found.append((failures, size, goodput(failures, size)))
    failures, size, of = found[1]
    count = int(run.days * DAY * of.goodput / run.iteration_seconds)
    every = [
        simulated_goodput(failures, size, (), [of.iterations], count, seed)
        for seed in range(simulations)
    ]
    return (
        run.name,
        run.gpus,
        f"{mtbf / 3600:,.0f}",
        f"{of.mean_seconds / 3600:.2f}",
        f"{of.iterations * run.iteration_seconds / 60:.1f}",
        f"{stop:.1f}",
        *(f"{one.goodput:.1%}" for _, _, one in found),
        f"{np.mean(every):.1%}",
        run.effective,
    )
