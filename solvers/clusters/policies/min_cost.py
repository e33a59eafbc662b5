"""Minimum cost; see ``formulations.policies.cost``."""

import math
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem
from stagewright.formulations.clusters.policies import cost
from stagewright.formulations.clusters.policies.cost import Costed
from stagewright.formulations.clusters.polytope import Groups, polytope
from stagewright.formulations.forms.answers import Answer, Limits, Status
from stagewright.formulations.forms.models import weak_duality_bound
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.backends import backend
from stagewright.solvers.clusters.answer import AllocationResult
from stagewright.solvers.clusters.levels import (
    TOLERANCE,
    LevelAttempt,
    all_scarce,
    scarce_time,
    split_until_proved,
)

_SLACKS = (1e-9, 1e-7)  # of the best ratio, for the sake of work; the second if the first fails
_CLOSE = 1e-6  # of the work: as near as it is brought to its most


@dataclass(frozen=True, slots=True, eq=False)
class _BestRatio:
    """The best ratio over groups, and totals ``y`` with most work at it, None without an answer."""

    asked: Costed
    answer: Answer[Floats]
    y: Floats | None
    ratio: float
    bound: float


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """Two linear programs over the kinds of jobs: the best ratio, then the most work at it."""
    return solve_above(problem, np.zeros(len(problem)), limits)


def solve_above(problem: AllocationProblem, floor: Floats, limits: Limits) -> AllocationResult:
    """Minimum cost where every job has at least ``floor`` steps per second."""
    cost.positive_prices(problem)
    began = perf_counter()

    def left() -> Limits:
        return replace(limits, seconds=limits.left(perf_counter() - began))

    def attempt(groups: Groups) -> LevelAttempt[_BestRatio]:
        found = _ratio(problem, groups, floor, left())
        if found.gap > TOLERANCE or found.answer.y is None:
            return found
        return _most_work(found.answer, groups, left())

    best = split_until_proved(problem, floor, attempt)
    if best.y is None:
        return AllocationResult(best.answer.status, None, None, None, None)
    allocation = best.asked.valid.invert(best.y)
    return AllocationResult(
        best.answer.status,
        cost.objective(problem, allocation),
        best.bound,
        allocation,
        f"duals of the Charnes-Cooper program over groups of jobs ({best.answer.backend})",
        notes=_waiting(problem, allocation),
    )


def _ratio(
    problem: AllocationProblem, groups: Groups, floor: Floats, limits: Limits
) -> LevelAttempt[_BestRatio]:
    valid = polytope(problem, groups)
    asked = cost.costed(valid, floor)
    program = cost.ratio_program(asked)
    answer = backend.solve(program.form, limits=limits)
    if answer.values is None or answer.duals is None:
        nothing = _BestRatio(asked, answer, None, math.nan, math.nan)
        # Out of time, finer groups would not help; infeasible, they may.
        stuck = answer.status is not Status.INFEASIBLE
        gap = 0.0 if stuck else math.inf
        return LevelAttempt(nothing, gap, all_scarce(groups), failed=stuck)
    y = np.clip(answer.values[:-1] / answer.values[-1], 0.0, valid.most)
    ratio = float(asked.work @ y / (asked.cost @ y))
    bound = -weak_duality_bound(program.relaxed, answer.duals)
    # Out of time, finer groups would come too late.
    gap = (bound - ratio) / bound if answer.status is Status.OPTIMAL else 0.0
    return LevelAttempt(
        _BestRatio(asked, answer, y, ratio, bound), gap, scarce_time(groups, answer.duals)
    )


def _most_work(best: _BestRatio, groups: Groups, limits: Limits) -> LevelAttempt[_BestRatio]:
    """The allocation with most work among those with the best ratio of work to cost."""
    assert best.y is not None
    asked, valid = best.asked, best.asked.valid
    spent = float(asked.cost @ best.y)
    for slack in _SLACKS:
        form = cost.work_program(asked, best.ratio * (1 - slack), spent)
        answer = backend.solve(form, limits=limits)
        if answer.values is None or answer.duals is None:
            continue
        y = np.clip(answer.values, 0.0, valid.most)
        relaxed = replace(form, row_upper=form.row_upper.copy())
        relaxed.row_upper[: len(valid.upper)] = valid.relaxed_upper()
        bound = -weak_duality_bound(relaxed, answer.duals)
        gap = (bound - float(asked.work @ y)) / bound
        finer = scarce_time(groups, answer.duals)
        return LevelAttempt(replace(best, y=y), gap if gap > _CLOSE else 0.0, finer)
    return LevelAttempt(best, 0.0, all_scarce(groups))


def _waiting(problem: AllocationProblem, allocation: Allocation) -> tuple[str, ...]:
    served = np.zeros(len(problem), dtype=bool)
    served[allocation.job] = True
    served[allocation.partner[allocation.partner >= 0]] = True
    waiting = int((~served).sum())
    if not waiting:
        return ()
    return (
        f"{waiting} of {len(problem)} jobs wait: what is free now would give less work for each "
        "dollar",
    )
