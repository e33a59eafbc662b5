"""Minimum makespan; see ``formulations.policies.makespan``."""

from dataclasses import replace
from time import perf_counter

import numpy as np

from stagewright.formulations.clusters.allocation import AllocationProblem, throughput
from stagewright.formulations.clusters.policies import makespan
from stagewright.formulations.clusters.polytope import group_by, polytope
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.forms.models import weak_duality_bound
from stagewright.solvers.backends.backend import solve as solve_form
from stagewright.solvers.clusters.answer import AllocationResult
from stagewright.solvers.clusters.levels import central_level

_MOST_PARTS = 16
_SAME = 1e-3  # relative, of two ends


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """One linear program in 1 / T: every job's throughput is at least num_steps / T.

    Where jobs choose among counts, a second one over jobs says what runs first.
    """
    until = perf_counter() + limits.seconds
    level = central_level(problem, problem.steps, limits)
    if level.allocation is None:
        return AllocationResult(level.status, None, None, None, None, maximises=False)
    result = AllocationResult(
        level.status,
        makespan.objective(problem, level.allocation),
        1 / level.bound,
        level.allocation,
        f"duals of the linear program in 1/T over groups of jobs ({level.backend})",
        maximises=False,
        one_more=1 / level.bound - 1 / (level.bound + level.price),
    )
    if not problem.elastic:
        return result
    return _early(problem, result, replace(limits, seconds=max(0.0, until - perf_counter())))


def _early(
    problem: AllocationProblem, result: AllocationResult, limits: Limits
) -> AllocationResult:
    """``result`` with what runs first; as it is where that is not found in time."""
    assert result.objective is not None
    until, part = perf_counter() + limits.seconds, makespan.FIRST
    valid = polytope(problem, group_by(problem, np.arange(len(problem))))
    for _ in range(_MOST_PARTS):
        form = makespan.early_ends(valid, result.objective, part)
        left = replace(limits, seconds=max(0.0, until - perf_counter()))
        answer = solve_form(form, limits=left)
        if answer.values is None or answer.duals is None:
            return result
        first = np.clip(answer.values[: valid.columns], 0.0, valid.most)
        allocation = valid.invert(first)
        with np.errstate(divide="ignore"):
            ends = (problem.steps / throughput(problem, allocation)).min() / result.objective
        if ends <= part * (1 + _SAME):
            break
        part = min(float(ends), 1.0)
    else:
        return result
    value, bound = -form.cost[: valid.columns] @ first, -weak_duality_bound(form, answer.duals)
    note = (
        f"short jobs first: {value:.6g} jobs end per makespan at the speeds of the start, at "
        f"those of no other start more than {bound:.6g} ({answer.backend})"
    )
    return replace(result, first=allocation, notes=(note,))
