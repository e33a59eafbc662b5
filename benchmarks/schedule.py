"""The schedule of fixed, unequal stages: seconds and gaps.

Times are random integers, transfers are not free, and memory limits the microbatches in flight to
1F1B's need plus ``extra``. ``python -m benchmarks schedule``.
"""

from dataclasses import dataclass

import numpy as np
from rich.progress import track

from benchmarks.report import Table
from benchmarks.spec import BenchSpec
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.solvers.pipelines.scheduling import ScheduleResult, solve_schedule

THREADS = 1
SEEDS = range(5)
TARGETS = {8: ("proved", 10.0), 16: ("0.5 %", 30.0), 32: ("1 %", 60.0)}


@dataclass(frozen=True, slots=True)
class Case:
    """S stages, M microbatches, and S - s + extra of them in flight on stage s."""

    stages: int
    microbatches: int
    extra: int
    seed: int


def unequal_stages(case: Case) -> MakespanProblem:
    """Forwards of 5-19, backwards 1.5-2.5 times that, transfers of 1-5, all-reduces of 0-29."""
    random = np.random.default_rng(case.seed)
    stages = case.stages

    def draw(low: int, high: int, count: int) -> tuple[float, ...]:
        return tuple(random.integers(low, high, count).astype(float).tolist())

    forward = draw(5, 20, stages)
    backward = tuple(float(int(time * random.integers(15, 26) / 10)) for time in forward)
    return MakespanProblem(
        case.microbatches,
        forward,
        backward,
        draw(1, 6, stages - 1),
        draw(1, 6, stages - 1),
        draw(0, 30, stages),
        tuple(min(case.microbatches, stages - s + case.extra) for s in range(stages)),
    )


SPEC = BenchSpec(
    "schedule",
    unequal_stages,
    tuple(
        Case(stages, 4 * stages, extra, seed)
        for stages in TARGETS
        for extra in (1, 2, 0, 4 * stages)
        for seed in SEEDS
    ),
    few=len(SEEDS),
)


def run(case: Case) -> ScheduleResult:
    """The best schedule within the target's time."""
    limits = Limits(seconds=TARGETS[case.stages][1], threads=THREADS, seed=0)
    return solve_schedule(SPEC.build(case), "optimal", limits)


def tables(quick: bool) -> list[Table]:
    """A row per size and limit."""
    results = {case: run(case) for case in track(SPEC.cases(quick), "schedules")}
    times = []
    for size, extra in dict.fromkeys((case.stages, case.extra) for case in results):
        found = [r for c, r in results.items() if (c.stages, c.extra) == (size, extra)]
        aim, seconds = TARGETS[size]
        proved = sum(result.status is Status.OPTIMAL for result in found)
        gaps = [result.gap or 0.0 for result in found]
        times.append(
            (
                f"{size} x {4 * size}",
                _limit(size, extra),
                f"{aim} in {seconds:g} s",
                f"{proved} of {len(found)}",
                f"{np.mean(gaps):.2%}",
                f"{max(gaps):.2%}",
                f"{np.median([result.seconds for result in found]):.2f}",
                f"{max(result.seconds for result in found):.2f}",
            )
        )
    return [
        Table(
            "schedule-time",
            f"Schedules of unequal stages, one thread, {len(SEEDS)} seeds each",
            ("stages x M", "in flight", "target", "proved", "mean gap", "largest gap",
             "median s", "most s"),
            tuple(times),
        ),
    ]  # fmt: skip


def _limit(stages: int, extra: int) -> str:
    return "no limit" if extra >= 4 * stages else f"S - s + {extra}" if extra else "S - s"
