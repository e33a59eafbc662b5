"""Solves ``max theta`` over all jobs exactly, with few groups of them (see ``polytope``)."""

import math
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, throughput
from stagewright.formulations.clusters.policies.levels import level_program
from stagewright.formulations.clusters.polytope import Groups, polytope
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.forms.duality import weak_duality_bound
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.backends.backend import UnknownStatusError, solve
from stagewright.solvers.clusters.splitting import (
    TOLERANCE,
    Attempt,
    all_scarce,
    scarce_time,
    split_until_proved,
)

ROUNDING = 1e-6  # relative: what solvers' tolerances leave


@dataclass(frozen=True, slots=True, eq=False)
class MaxLevel:
    """``theta`` is reached by ``allocation``; no allocation reaches more than ``bound``.

    ``allocation`` is None and ``theta`` nan where there is none.
    """

    status: Status
    theta: float
    bound: float
    allocation: Allocation | None
    seconds: float
    backend: str


def max_level(
    problem: AllocationProblem,
    need: Floats,
    *,
    limits: Limits | None = None,
    tolerance: float = TOLERANCE,
    backend: str | None = None,
) -> MaxLevel:
    """Maximise theta such that throughput(m, X) >= theta * need_m for every job.

    Parameters
    ----------
    need
        Steps per second, positive, by job.
    tolerance
        Relative gap at which the answer is good enough.
    """
    limits = limits or Limits(seconds=math.inf)
    began = perf_counter()

    def attempt(groups: Groups) -> Attempt[MaxLevel]:
        left = limits.left(perf_counter() - began)
        within = replace(limits, seconds=left)
        return _solve(problem, groups, need, within, backend, tolerance)

    level = split_until_proved(problem, need, attempt, tolerance)
    return replace(level, seconds=perf_counter() - began)


def central_level(problem: AllocationProblem, need: Floats, limits: Limits) -> MaxLevel:
    """As :func:`max_level`, but an optimum in the interior of the optimal face.

    Like jobs get the like, and what the optimum leaves open is spread, where a vertex leaves it
    idle. Where interior points alone do not come close enough, a vertex answers; so does a backend
    that ``limits`` names.
    """
    if limits.backend is not None:
        return max_level(problem, need, limits=limits)
    try:
        level = max_level(problem, need, limits=limits, tolerance=ROUNDING, backend="highs-ipm")
    except UnknownStatusError:
        return max_level(problem, need, limits=limits)
    if level.status is Status.OPTIMAL:
        return level
    return max_level(problem, need, limits=limits)


def _solve(
    problem: AllocationProblem,
    groups: Groups,
    need: Floats,
    limits: Limits,
    backend: str | None,
    tolerance: float,
) -> Attempt[MaxLevel]:
    """Solve one linear program; also return the groups whose time is scarce."""
    valid = polytope(problem, groups)
    # No job can have more than its best rate all of the time.
    most = float((problem.best_rates() / need).min())
    program = level_program(valid, groups.total(need), most)
    answer = solve(program.form, backend, limits)
    if answer.values is None or answer.duals is None:
        level = MaxLevel(answer.status, math.nan, math.nan, None, 0.0, answer.backend)
        return Attempt(level, math.inf, all_scarce(groups), failed=True)
    allocation = valid.invert(np.clip(answer.values[:-1], 0.0, valid.most), all_served=True)
    theta = float((throughput(problem, allocation) / need).min())
    bound = -weak_duality_bound(program.relaxed, answer.duals) * program.unit
    gap = (bound - theta) / abs(bound) if bound else 0.0
    # The optimum is of the program by groups; the bound says how good it is for the jobs.
    status = Status.OPTIMAL if gap <= max(tolerance, ROUNDING) else Status.FEASIBLE
    level = MaxLevel(status, theta, bound, allocation, 0.0, answer.backend)
    return Attempt(level, gap, scarce_time(groups, answer.duals))
