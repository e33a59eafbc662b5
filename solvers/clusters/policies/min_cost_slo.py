"""Minimum cost under SLOs; see ``formulations.policies.slo``."""

from dataclasses import replace
from time import perf_counter

import numpy as np

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.policies import cost
from stagewright.formulations.clusters.policies.cost import positive_prices
from stagewright.formulations.clusters.polytope import group_by, polytope
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.backends import backend
from stagewright.solvers.clusters.answer import AllocationResult
from stagewright.solvers.clusters.levels import max_level
from stagewright.solvers.clusters.policies import min_cost

_ROOM = 1e-8  # of a floor that only just fits: a solver's rounding


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """The SLOs that can be met, as few missing parts as possible of the others, then the cost.

    Where they fit, groups of jobs decide; only where not, is the shortfall a program over jobs: its
    vertices leave few jobs short by much rather than all by a little.
    """
    positive_prices(problem)
    began = perf_counter()

    def left() -> Limits:
        return replace(limits, seconds=limits.left(perf_counter() - began))

    floor = np.where(cost.too_fast(problem), 0.0, cost.needs(problem))
    if not _fit(problem, floor, left()):
        status, met = _met_fraction(problem, floor, left())
        if met is None:
            return AllocationResult(status, None, None, None, None)
        floor = floor * met
    result = min_cost.solve_above(problem, floor, left())
    return replace(result, notes=(*cost.notes(problem, floor), *result.notes))


def _fit(problem: AllocationProblem, need: Floats, limits: Limits) -> bool:
    """Whether the jobs with a need can all have it, with the cluster to themselves."""
    asking = need > 0
    if not asking.any():
        return True
    level = max_level(problem.of(asking), need[asking], limits=limits)
    return level.theta >= 1 + _ROOM


def _met_fraction(
    problem: AllocationProblem, need: Floats, limits: Limits
) -> tuple[Status, Floats | None]:
    """The fraction of its need that each job gets when the total shortfall is minimal."""
    single = np.where(need > 0, np.arange(len(problem)) + 1, 0)
    groups = group_by(problem, single)
    form, asking = cost.shortfall_program(polytope(problem, groups), groups.total(need))
    answer = backend.solve(form, limits=limits)
    if answer.values is None:
        return answer.status, None
    met = np.zeros(len(groups))
    met[asking] = 1 - np.clip(answer.values[-len(asking) :], 0.0, 1.0)
    part = np.where(met < 1e-9, 0.0, met * (1 - _ROOM))
    return answer.status, np.asarray(part[groups.of_job])
