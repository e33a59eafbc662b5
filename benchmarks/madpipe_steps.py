"""MadPipe's two steps on every case of its study: the allocation, then its pattern.

The paper takes seconds to 15 minutes for the first, and has a limit of a minute for the second.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median
from time import process_time

from rich.progress import track

from benchmarks.madpipe import NETWORKS, PROCESSES, QUICK, SWEEP, Case, problem
from benchmarks.report import Table
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.patterns.madpipe import StageAllocationProblem
from stagewright.formulations.patterns.pattern_problems import pattern_problem
from stagewright.solvers.patterns.madpipe import least_period
from stagewright.solvers.patterns.pattern import best_pattern
from stagewright.solvers.planners.steps.warm_up import compile_kernels

TARGET = 5.0  # seconds, for a pattern
LIMITS = Limits(seconds=30.0)


@dataclass(frozen=True, slots=True)
class Steps:
    """CPU seconds of both steps, whether each was proved, and reached over expected period.

    ``ratio`` is None where no pattern fits, or there is no allocation.
    """

    case: Case
    allocation_seconds: float
    exact: bool
    pattern_seconds: float
    proved: bool
    ratio: float | None


def run(case: Case) -> Steps:
    """The optimum with one special device, and the best pattern of its stages."""
    compile_kernels("madpipe")
    asked = problem(case)
    groups = tuple((v,) for v in range(case.devices))
    began = process_time()
    found = least_period(StageAllocationProblem(asked, groups, case.devices - 1), LIMITS)
    allocated = process_time()
    if found.stages is None:
        return Steps(case, allocated - began, found.exact, 0.0, True, None)
    answer = best_pattern(pattern_problem(asked, found.stages), LIMITS)
    proved = answer.status in (Status.OPTIMAL, Status.INFEASIBLE)
    ratio = None if answer.period is None else answer.period / found.period
    spent = process_time() - allocated
    return Steps(case, allocated - began, found.exact, spent, proved, ratio)


def study(cases: Sequence[Case]) -> list[Steps]:
    """All cases, in processes of one thread each."""
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        return list(track(pool.map(run, cases), "madpipe_steps", total=len(cases)))


def tables(quick: bool) -> list[Table]:
    """Time and proofs per network."""
    steps = study(QUICK if quick else SWEEP)
    rows = [
        _row(name, [one for one in steps if one.case.network == network])
        for network, name in NETWORKS.items()
        if any(one.case.network == network for one in steps)
    ]
    columns = (
        "network", "cases", "allocation CPU s, median", "largest", "exact", "pattern CPU s, median",
        "largest", f"proved within {TARGET:g} s", "proved within 30 s", "reached as expected",
        "no pattern fits", "worst reached / expected",
    )  # fmt: skip
    title = "MadPipe's allocations with one special device, and their patterns"
    return [Table("madpipe-steps", title, columns, tuple(rows))]


def _row(name: str, steps: Sequence[Steps]) -> tuple[object, ...]:
    ratios = [one.ratio for one in steps if one.ratio is not None]
    allocations = [one.allocation_seconds for one in steps]
    patterns = [one.pattern_seconds for one in steps]
    return (
        name, len(steps), f"{median(allocations):.2f}", f"{max(allocations):.2f}",
        sum(one.exact for one in steps), f"{median(patterns):.3f}", f"{max(patterns):.2f}",
        sum(one.proved and one.pattern_seconds <= TARGET for one in steps),
        sum(one.proved for one in steps),
        sum(ratio <= 1 + 1e-6 for ratio in ratios),
        len(steps) - len(ratios), max(ratios, default=None),
    )  # fmt: skip
