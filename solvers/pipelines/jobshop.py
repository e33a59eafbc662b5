"""Solve the job shop: dispatching rules, then CP-SAT from the best of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress, Status, silent
from stagewright.formulations.pipelines.jobshop import (
    JobShop,
    JobShopByIntervals,
    JobShopSchedule,
    Pair,
    static_bound,
)
from stagewright.solvers.backends.backend import scheduler, solve_intervals

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

    schedule: JobShopSchedule | None
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

    Raises InputError if there is no such backend. Raises InvalidPlan if a schedule breaks a rule of
    the problem.
    """
    began = perf_counter()
    scheduler(limits, problem.is_flexible)  # refuses an unknown backend before any work
    static, argument = static_bound(problem)
    incumbent = _dispatch_best(problem, limits)
    form = JobShopByIntervals(problem, incumbent).apply()
    left = replace(limits, seconds=limits.left(perf_counter() - began))
    answer = solve_intervals(form, left, on_progress)
    schedule = incumbent
    if answer.values is not None:
        schedule = JobShopByIntervals(problem).invert(answer.values)
    bound = static if answer.bound < static else round(answer.bound)
    proved_by = argument if bound == static else scheduler(limits).solver
    cost = None if schedule is None else problem.evaluate(*schedule)
    status = Status.OPTIMAL if cost == bound else limits.status(cost is not None)
    return JobShopResult(
        schedule,
        cost,
        bound,
        None if cost is None else (cost - bound) / max(cost, 1),
        status,
        proved_by,
        perf_counter() - began,
        answer.log,
        answer.progress,
    )


def _dispatch_best(problem: JobShop, limits: Limits) -> JobShopSchedule | None:
    """The best schedule of the rules that end within ``limits``."""
    best: JobShopSchedule | None = None
    began = perf_counter()
    for rule in RULES:
        if limits.left(perf_counter() - began) <= 0:
            break
        found = dispatch(problem, rule)
        late = limits.left(perf_counter() - began) <= 0
        if not late and (best is None or problem.evaluate(*found) < problem.evaluate(*best)):
            best = found
    return best


def dispatch(problem: JobShop, rule: Rule) -> JobShopSchedule:
    """The active schedule that ``rule`` makes, smallest first (Giffler and Thompson 1960).

    A step with a choice of machines is on the one where it ends first.
    """
    choices, least = problem.choices, problem.least_durations
    left = [sum(row) for row in least]
    rows: list[list[tuple[int, int]]] = [[] for _ in choices]
    ready = [0] * len(choices)
    free: dict[int, int] = {}

    def earliest(j: int) -> tuple[int, int, int]:
        def end(pair: Pair) -> tuple[int, Pair]:
            return max(ready[j], free.get(pair[0], 0)) + pair[1], pair

        machine, duration = min(choices[j][len(rows[j])], key=end)
        return max(ready[j], free.get(machine, 0)), machine, duration

    open_jobs = set(range(len(choices)))
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
        left[j] -= least[j][len(rows[j])]
        rows[j].append((start, machine))
        ready[j] = free[machine] = start + duration
        if len(rows[j]) == len(choices[j]):
            open_jobs.remove(j)
    return JobShopSchedule(
        tuple(tuple(start for start, _ in row) for row in rows),
        tuple(tuple(machine for _, machine in row) for row in rows),
    )
