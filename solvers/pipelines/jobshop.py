"""Solve the job shop: dispatching rules, then CP-SAT from the best of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress, Status, silent
from stagewright.formulations.pipelines.jobshop import ByIntervals, JobShop, Starts
from stagewright.solvers.backends.schedulers import scheduler, solve_intervals

# Priorities of a job at its step k, from its remaining work and the duration of the step.
Rule = Callable[[int, int], float]
RULES: tuple[Rule, ...] = (
    lambda left, duration: -left,  # most work remaining
    lambda left, duration: duration,  # shortest processing time
    lambda left, duration: -(left - duration),  # most work after this step
    lambda left, duration: duration / max(left, 1),
)


@dataclass(frozen=True, slots=True)
class JobShopResult:
    """A checked schedule, if one was found in time, with its bound.

    ``gap`` is (cost - bound) / cost.
    """

    starts: Starts | None
    cost: int | None
    bound: int
    gap: float | None
    status: Status
    proved_by: str
    seconds: float
    log: str = ""
    progress: tuple[Progress, ...] = ()


def solve_jobshop(
    problem: JobShop, limits: Limits, on_progress: OnProgress = silent
) -> JobShopResult:
    """The best schedule found within ``limits``, with a proved bound.

    Raises
    ------
    InputError
        If there is no such backend.
    InvalidPlan
        If a schedule breaks a rule of the problem.
    """
    began = perf_counter()
    scheduler(limits)  # refuses an unknown backend before any work
    static = ByIntervals(problem).apply().lower_bound
    incumbent = dispatch_best(problem, limits)
    form = ByIntervals(problem, incumbent).apply()
    left = replace(limits, seconds=limits.left(perf_counter() - began))
    answer = solve_intervals(form, left, on_progress)
    starts = incumbent
    if answer.values is not None:
        starts = ByIntervals(problem).invert(answer.values)
    bound = static if answer.bound < static else round(answer.bound)
    proved_by = "one-machine relaxation" if bound == static else scheduler(limits).solver
    cost = None if starts is None else problem.evaluate(starts)
    status = Status.OPTIMAL if cost == bound else limits.status(cost is not None)
    return JobShopResult(
        starts,
        cost,
        bound,
        None if cost is None else (cost - bound) / max(cost, 1),
        status,
        proved_by,
        perf_counter() - began,
        answer.log,
        answer.progress,
    )


def dispatch_best(problem: JobShop, limits: Limits) -> Starts | None:
    """The best schedule of the rules that end within ``limits``."""
    best: Starts | None = None
    began = perf_counter()
    for rule in RULES:
        if limits.left(perf_counter() - began) <= 0:
            break
        starts = dispatch(problem, rule)
        late = limits.left(perf_counter() - began) <= 0
        if not late and (best is None or problem.evaluate(starts) < problem.evaluate(best)):
            best = starts
    return best


def dispatch(problem: JobShop, rule: Rule) -> Starts:
    """The active schedule that ``rule`` makes, smallest first (Giffler and Thompson 1960)."""
    left = [sum(duration for _, duration in job) for job in problem.jobs]
    starts: list[list[int]] = [[] for _ in problem.jobs]
    ready = [0] * len(problem.jobs)
    free: dict[int, int] = {}

    def earliest(j: int) -> tuple[int, int, int]:
        machine, duration = problem.jobs[j][len(starts[j])]
        return max(ready[j], free.get(machine, 0)), machine, duration

    open_jobs = set(range(len(problem.jobs)))
    while open_jobs:
        steps = {j: earliest(j) for j in open_jobs}
        # The machine with the earliest completion; jobs that can start before it are candidates.
        completion, machine = min((start + work, k) for start, k, work in steps.values())
        rivals = [j for j, (start, k, work) in steps.items() if k == machine]
        rivals = [
            j for j in rivals if steps[j][0] < completion or steps[j][0] + steps[j][2] <= completion
        ]
        j = min(rivals, key=lambda j: (rule(left[j], steps[j][2]), j))
        start, _, duration = steps[j]
        starts[j].append(start)
        ready[j] = free[machine] = start + duration
        left[j] -= duration
        if len(starts[j]) == len(problem.jobs[j]):
            open_jobs.remove(j)
    return tuple(tuple(row) for row in starts)
