"""Minimum makespan within a budget; see ``formulations.policies.budget``."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.policies import cost, makespan
from stagewright.formulations.clusters.policies.cost import dollars_per_hour, prices
from stagewright.formulations.clusters.polytope import Groups, Polytope, polytope
from stagewright.formulations.forms.answers import Answer, Limits, Status
from stagewright.formulations.forms.models import weak_duality_bound
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.backends import backend
from stagewright.solvers.clusters.answer import AllocationResult
from stagewright.solvers.clusters.levels import (
    FIRST_RATIO,
    TOLERANCE,
    LevelAttempt,
    all_scarce,
    groups_by_need,
    scarce_time,
    split_until_proved,
)

_ROOM = 1e-9  # of the makespan, for the sake of dollars
_LEAST_ROOM = 1e-6  # of the least budget, so that it is one
_CLOSE = 1e-6  # of the dollars: as near as they are brought to their least
_CENT = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class _Fastest:
    """The least makespan over groups and its bound, in units; both nan without an answer.

    ``values`` are its columns, those that cost least where that was asked for.
    """

    valid: Polytope
    answer: Answer[Floats]
    makespan: float
    bound: float
    values: Floats | None


def solve(
    problem: AllocationProblem, limits: Limits, budget_dollars: float | None = None
) -> AllocationResult:
    """A linear program for the makespan, then one for the dollars at that makespan.

    Raises InputError if there is no budget, it is not positive, or an accelerator has no price.
    """
    budget_dollars = cost.require_budget(budget_dollars)
    prices(problem)
    began = perf_counter()

    def left() -> Limits:
        return replace(limits, seconds=limits.left(perf_counter() - began))

    best = _best(problem, budget_dollars, left)
    if best.answer.status is Status.INFEASIBLE:
        return _too_little(problem, budget_dollars, left)
    if best.values is None:
        return AllocationResult(best.answer.status, None, None, None, None, maximises=False)
    shares = np.clip(best.values[:-1] / best.values[-1], 0.0, best.valid.most)
    allocation = best.valid.invert(shares, all_served=True)
    seconds = makespan.objective(problem, allocation)
    spent = seconds / cost.SECONDS_PER_HOUR * dollars_per_hour(problem, allocation)
    return AllocationResult(
        best.answer.status,
        seconds,
        best.bound * cost.unit_seconds(problem),
        allocation,
        f"duals of the linear program over groups of jobs ({best.answer.backend})",
        maximises=False,
        notes=(f"costs ${spent:.6g} of the budget of ${budget_dollars:.6g}",),
    )


def _best(
    problem: AllocationProblem, budget_dollars: float, left: Callable[[], Limits]
) -> _Fastest:
    """The least makespan, and then the least dollars, over groups that lose neither."""

    def attempt(groups: Groups) -> LevelAttempt[_Fastest]:
        valid = polytope(problem, groups)
        program = cost.budget_program(valid, budget_dollars)
        answer = backend.solve(program.form, limits=left())
        if answer.values is None or answer.duals is None:
            # Finer groups cost no less: with time enough no group's is scarce.
            nothing = _Fastest(valid, answer, math.nan, math.nan, None)
            late = answer.status is Status.NO_ANSWER
            return LevelAttempt(nothing, 0.0, all_scarce(groups), failed=late)
        found = float(answer.values[-1])
        bound = min(weak_duality_bound(program.bounding(found), answer.duals), found)
        best = _Fastest(valid, answer, found, bound, answer.values)
        # Out of time, finer groups would come too late.
        gap = (found - bound) / found if answer.status is Status.OPTIMAL else 0.0
        if gap > TOLERANCE:
            return LevelAttempt(best, gap, scarce_time(groups, answer.duals))
        return _cheapest(best, program, groups, left())

    return split_until_proved(problem, problem.steps, attempt)


def _cheapest(
    best: _Fastest, program: cost.BudgetProgram, groups: Groups, limits: Limits
) -> LevelAttempt[_Fastest]:
    """The cheapest of the fastest allocations."""
    makespan = best.makespan * (1 + _ROOM)
    answer = backend.solve(program.cheapest(makespan), limits=limits)
    if answer.values is None or answer.duals is None or answer.objective is None:
        return LevelAttempt(best, 0.0, all_scarce(groups))
    bound = weak_duality_bound(program.cheapest(makespan, relaxed=True), answer.duals)
    gap = (answer.objective - bound) / max(answer.objective, _CENT)
    cheapest = replace(best, values=answer.values)
    return LevelAttempt(cheapest, gap if gap > _CLOSE else 0.0, scarce_time(groups, answer.duals))


def _too_little(
    problem: AllocationProblem, budget_dollars: float, left: Callable[[], Limits]
) -> AllocationResult:
    """An infeasible answer that names the least sufficient budget and its makespan."""
    groups = groups_by_need(problem, problem.steps, np.full(len(problem), FIRST_RATIO))
    program = cost.budget_program(polytope(problem, groups), budget_dollars)
    answer = backend.solve(program.cheapest(), limits=left())
    note = f"a budget of ${budget_dollars:.6g} is too little for these jobs"
    if answer.objective is not None:
        least = answer.objective * (1 + _LEAST_ROOM)
        note += f": they cost at least ${least:.6g}"
        slowest = _best(problem, least, left)
        if slowest.values is not None:
            hours = slowest.makespan * cost.unit_seconds(problem) / cost.SECONDS_PER_HOUR
            note += f", and are then done after {hours:.4g} h"
    return AllocationResult(
        Status.INFEASIBLE, None, None, None, None, maximises=False, notes=(note,)
    )
