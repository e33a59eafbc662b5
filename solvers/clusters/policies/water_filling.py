"""Water filling; see ``formulations.policies.water_filling``."""

import math
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.policies import water_filling
from stagewright.formulations.clusters.policies.water_filling import Needs, Rows
from stagewright.formulations.clusters.polytope import group_by
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.forms.models import LinearProgram, weak_duality_bound
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.solvers.backends.backend import solve as solve_form
from stagewright.solvers.clusters.answer import AllocationResult

STUCK = 1e-7  # units that a stuck job may still gain
RELAXED = (0.0, 1e-9, 1e-7)  # parts of the floors to give up if rounding makes them infeasible
_UNSEEN = 2e-9  # of the highest speed: HiGHS drops coefficients of up to 1e-9, taken for zeros
_SAME_LEVEL = 1e-7  # units: a round that raises the fastest by less raises nobody; it is rounding


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """A linear program for each round over groups of equal jobs, and one to prove each level."""
    return fill(problem, water_filling.flat(problem), limits)


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    """``totals`` in ``rows`` raise all jobs by theta * need.

    Jobs that are ``stuck``, by job, get no further. No valid allocation raises all by more than
    ``bound``; one more accelerator of a type adds at most its ``price`` to that.
    """

    theta: float
    bound: float
    price: Floats
    stuck: Bools
    rows: Rows
    totals: Floats
    backend: str


def fill(problem: AllocationProblem, needs: Needs, limits: Limits) -> AllocationResult:
    """Water filling with the weights of ``needs``.

    ``objective`` and ``bound`` are those of the first round: the least normalised throughput by
    weight. That the rounds after it are right too is for the verifier to prove; unless it does,
    the status is not optimal.
    """
    ends = perf_counter() + limits.seconds
    unit = water_filling.units(problem)
    floor = np.zeros(len(problem))
    levels = np.full(len(problem), -1)
    level = 0
    last, bound, price = None, math.nan, np.zeros(0)
    while (levels < 0).any():
        need = needs(levels >= 0)
        speed = float((need / unit).max())
        before = last.rows if last is not None else None
        found = _raise(problem, need / speed, floor, before, _left(limits, ends))
        if isinstance(found, Status):
            return _unfinished(problem, needs, found, last, bound)
        if last is None:
            bound, price = found.bound / speed, found.price / speed
        last = found
        if found.theta > _SAME_LEVEL:
            level += 1
            floor = floor + found.theta * need / speed
        levels[found.stuck & (levels < 0)] = level
    assert last is not None  # there are jobs
    result = _verified(problem, needs, levels, last, bound, _left(limits, ends))
    return replace(result, one_more=price)


def _left(limits: Limits, ends: float) -> Limits:
    return replace(limits, seconds=max(0.0, ends - perf_counter()))


def _rows(problem: AllocationProblem, need: Floats, floor: Floats, before: Rows | None) -> Rows:
    """Rows with a group for equal jobs; the previous round's rows if its groups still hold."""
    if before is not None:
        groups = before.valid.groups
        one = np.zeros(len(groups), dtype=np.int64)
        one[groups.of_job] = np.arange(len(problem))
        alike = one[groups.of_job]
        if np.allclose(need, need[alike], 1e-10, 0) and np.allclose(floor, floor[alike], 1e-10, 0):
            return before
    groups = group_by(problem, water_filling.key(need), water_filling.key(floor))
    return water_filling.rows(problem, groups)


def _raise(
    problem: AllocationProblem, need: Floats, floor: Floats, before: Rows | None, limits: Limits
) -> _Round | Status:
    """One round; the solver's status if it has no answer."""
    rows = _rows(problem, need, floor, before)
    groups, valid = rows.valid.groups, rows.valid
    need, floor = groups.total(need) / groups.size, groups.total(floor) / groups.size
    for relaxed in RELAXED:
        form = rows.raising(need, floor * (1 - relaxed))
        answer = solve_form(form, limits=limits)
        if answer.status is not Status.INFEASIBLE:
            break
    if answer.values is None or answer.duals is None:
        return answer.status
    totals = np.clip(answer.values[:-1], 0.0, valid.most)
    reached = (valid.rate @ totals) / groups.size
    speed = need / rows.unit
    rising = speed > _UNSEEN * speed.max()
    theta = max(0.0, float(((reached - floor)[rising] / need[rising]).min()))
    gain = rows.proved_gain(form, answer.duals, theta)
    stuck = gain <= max(STUCK, gain[rising].min())
    return _Round(
        theta,
        -weak_duality_bound(form, answer.duals),
        valid.prices(answer.duals),
        stuck[groups.of_job],
        rows,
        totals,
        answer.backend,
    )


def _verified(
    problem: AllocationProblem,
    needs: Needs,
    levels: Ints,
    last: _Round,
    bound: float,
    limits: Limits,
) -> AllocationResult:
    allocation = last.rows.valid.invert(last.totals)
    ends = perf_counter() + limits.seconds

    def duals(form: LinearProgram) -> Floats | None:
        return solve_form(form, limits=_left(limits, ends)).duals

    wrong = water_filling.verify(problem, allocation, levels, needs, duals)
    mean = float(water_filling.normalised(problem, allocation).mean())
    notes = (f"mean normalised throughput {mean:.4f}, in {levels.max()} levels",)
    return AllocationResult(
        Status.OPTIMAL if wrong is None else Status.FEASIBLE,
        water_filling.objective(problem, allocation, needs),
        bound,
        allocation,
        f"water-filling verifier: duals of one LP per level ({last.backend})"
        if wrong is None
        else None,
        levels=levels.astype(float),
        notes=notes if wrong is None else (*notes, f"not proved: {wrong}"),
    )


def _unfinished(
    problem: AllocationProblem, needs: Needs, status: Status, last: _Round | None, bound: float
) -> AllocationResult:
    """The answer after the rounds that ended before the time limit."""
    if last is None:
        return AllocationResult(status, None, None, None, None)
    allocation = last.rows.valid.invert(last.totals)
    return AllocationResult(
        Status.FEASIBLE,
        water_filling.objective(problem, allocation, needs),
        bound,
        allocation,
        None,
        notes=("not all jobs were raised as far as they go",),
    )
