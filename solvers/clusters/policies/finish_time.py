"""Finish-time fairness; see ``formulations.policies.finish_time``."""

import math
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem
from stagewright.formulations.clusters.policies import finish_time, shortest_first
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.solvers.clusters.answer import AllocationResult
from stagewright.solvers.clusters.levels import max_level

TOLERANCE = 1e-6
"""Relative width of the bracket at which the answer counts as optimal."""
COARSE = 0.05
_MOST_PROGRAMS = 80  # every fourth halves the bracket: more could only be rounding


@dataclass(slots=True)
class _Bracket:
    """No allocation is below ``low``; ``allocation`` reaches ``high``."""

    low: float
    high: float = math.inf
    allocation: Allocation | None = None

    @property
    def closed(self) -> bool:
        return self.high < math.inf and self.high - self.low <= TOLERANCE * self.high

    @property
    def precision(self) -> float:
        """Relative gap of the next level: a rough one will do while the bracket is wide."""
        return min(COARSE, max(TOLERANCE / 4, (1 - self.low / self.high) / 4))

    def offer(self, reached: float, allocation: Allocation) -> None:
        """Take ``allocation`` if its largest ratio is less."""
        if reached < self.high:
            self.high, self.allocation = reached, allocation


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """The secant method, in a bracket, on the level that every ratio leaves to the worst-off job.

    Each linear program moves both ends: its allocation reaches a ratio, its duals rule some out.
    """
    until = perf_counter() + limits.seconds
    fastest = problem.steps / shortest_first.least_seconds(problem)
    bracket = _Bracket(float(finish_time.ratios(problem, fastest).max()))
    isolated = float(finish_time.ratios(problem, problem.isolated_throughput()).max())
    rho = max(isolated, bracket.low * (1 + TOLERANCE))
    tried: list[tuple[float, float]] = []
    status, backend, more = Status.FEASIBLE, "", list[float]()
    while not bracket.closed and len(tried) < _MOST_PROGRAMS:
        left = replace(limits, seconds=max(0.0, until - perf_counter()))
        level = max_level(
            problem, finish_time.needs(problem, rho), limits=left, tolerance=bracket.precision
        )
        if level.allocation is None:
            status = level.status if bracket.allocation is None else status
            break
        backend = level.backend
        bracket.offer(finish_time.objective(problem, level.allocation), level.allocation)
        if bracket.allocation is None:  # out of time: some job makes no progress
            status = Status.NO_ANSWER
            break
        bracket.low = max(bracket.low, finish_time.least_beyond(problem, rho, level.bound))
        more = [finish_time.least_beyond(problem, rho, level.bound + one) for one in level.price]
        tried.append((rho, level.theta - 1))
        rho = _next(bracket, tried)
    if bracket.allocation is None:
        return AllocationResult(status, None, None, None, None, maximises=False)
    return AllocationResult(
        Status.OPTIMAL if bracket.closed else status,
        bracket.high,
        min(bracket.low, bracket.high),
        bracket.allocation,
        f"duals of {len(tried)} linear programs over groups of jobs ({backend})",
        maximises=False,
        one_more=np.maximum(0.0, bracket.low - np.array(more)) if more else None,
    )


def _next(bracket: _Bracket, tried: list[tuple[float, float]]) -> float:
    """The next ratio to try: by the secant, every fourth time the middle of the bracket."""
    middle = (bracket.low + bracket.high) / 2
    if len(tried) < 2 or len(tried) % 4 == 0:
        return middle
    (before, short), (last, missing) = tried[-2:]
    if missing == short:
        return middle
    secant = last - missing * (last - before) / (missing - short)
    return secant if bracket.low < secant < bracket.high else middle
