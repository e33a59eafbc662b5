"""Water filling; see ``formulations.policies.water_filling``."""

import math
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter

import numpy as np

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.policies import water_filling
from stagewright.formulations.clusters.policies.water_filling import (
    RELAXED,
    SAME_LEVEL,
    Needs,
    Rows,
)
from stagewright.formulations.clusters.polytope import group_by
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.forms.models import LinearProgram, weak_duality_bound
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.backends.backend import solve as solve_form
from stagewright.solvers.clusters.answer import AllocationResult

STUCK = 1e-7  # units that a stuck job may still gain
_UNSEEN = 2e-9  # of the highest speed: HiGHS drops coefficients of up to 1e-9, taken for zeros
_REACHED = 1e-9  # units, or part of a way, that may be missing: rounding


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """A few linear programs over groups of equal jobs: where accelerators run short, and proofs."""
    return fill(problem, water_filling.flat(problem), limits)


def fill(problem: AllocationProblem, needs: Needs, limits: Limits) -> AllocationResult:
    """Water filling with the weights of ``needs``.

    ``objective`` and ``bound`` are those of the first round: the least normalised throughput by
    weight. That the rounds after it are right too is for the verifier to prove; unless it does,
    the status is not optimal.
    """
    ends = perf_counter() + limits.seconds
    filling = _Filling(problem, needs, limits, ends)
    failed = None
    while failed is None and (filling.levels < 0).any():
        failed = filling.by_caps() or filling.by_program()
    last = filling.last
    if failed is not None:
        return _unfinished(problem, needs, failed, last, filling.bound)
    assert last is not None  # there are jobs
    left = _left(limits, ends)
    result = _verified(problem, needs, filling.levels, last, filling.bound, left)
    return replace(result, one_more=filling.price)


def _left(limits: Limits, ends: float) -> Limits:
    return replace(limits, seconds=max(0.0, ends - perf_counter()))


@dataclass(frozen=True, slots=True, eq=False)
class _Raise:
    """``totals`` in ``rows`` raise all jobs by theta * need; by ``duals`` of ``form`` no more."""

    theta: float
    form: LinearProgram
    duals: Floats
    rows: Rows
    totals: Floats
    backend: str

    @property
    def bound(self) -> float:
        """No valid allocation raises all jobs by more times their needs."""
        return -weak_duality_bound(self.form, self.duals)


class _Filling:
    """``floor`` and ``levels`` after so many rounds, by job; -1 is the level of a rising job.

    ``last`` is an allocation that reaches the floors. No valid allocation has a least normalised
    throughput by weight above ``bound``; one more accelerator of a type adds at most its ``price``.
    """

    def __init__(
        self, problem: AllocationProblem, needs: Needs, limits: Limits, ends: float
    ) -> None:
        self.problem, self.needs, self.limits, self.ends = problem, needs, limits, ends
        self.unit = water_filling.units(problem)
        self.floor, self.levels = np.zeros(len(problem)), np.full(len(problem), -1)
        self.last: _Raise | None = None
        self.bound, self.price = math.nan, np.zeros(len(problem.table.counts))
        self._time = np.ones(problem.rates.shape)  # of jobs on worker types, at most
        self._cuts = [water_filling.cut_of_accelerators(problem)]

    def by_caps(self) -> Status | None:
        """Go on while nothing but caps makes jobs stuck; the solver's status if it fails.

        The floors after many rounds are tried at once. If they are out of reach, the duals exclude
        them, and most rounds before them.
        """
        cap, most = water_filling.caps(self.problem, self._time), None
        while True:
            floor, levels, rounds = self._allowed(cap, most)
            if not rounds:
                return None
            way = (floor - self.floor) / self.unit
            length = float(way.max())
            if length > _REACHED:
                found = self._raise((floor - self.floor) / length, length)
                if isinstance(found, Status):
                    return found
                if found.theta < length * (1 - _REACHED):
                    self._cuts.append(found.rows.cut(found.duals))
                    most = rounds - 1
                    continue
                self.last = found
            if math.isnan(self.bound):
                need = self.needs(self.levels >= 0)
                self.bound = float((cap[need > 0] / need[need > 0]).min())
            self.floor, self.levels = floor, levels
            return None

    def _allowed(self, cap: Floats, most: int | None) -> tuple[Floats, Ints, int]:
        """Floors and levels after as many rounds as no cut excludes, ``most`` at most; how many."""
        found, rounds = (self.floor, self.levels), 0
        states = water_filling.rounds_of_caps(self.problem, self.needs, *found, cap)
        for state in islice(states, most):
            if any(cut.excludes(state[0]) for cut in self._cuts):
                break
            found, rounds = state, rounds + 1
        return *found, rounds

    def by_program(self) -> Status | None:
        """One round, of which a program tells how far it goes; the solver's status if it fails."""
        if (self.levels >= 0).all():
            return None
        need = self.needs(self.levels >= 0)
        speed = float((need / self.unit).max())
        found = self._raise(need / speed)
        if isinstance(found, Status):
            return found
        rows, groups = found.rows, found.rows.valid.groups
        if math.isnan(self.bound):
            self.bound = found.bound / speed
            self.price = rows.valid.prices(found.duals) / speed
        if found.theta > SAME_LEVEL:
            self.floor = self.floor + found.theta * need / speed
        level = max(0, self.levels.max()) + (found.theta > SAME_LEVEL)
        gain = rows.proved_gain(found.form, found.duals, found.theta)[groups.of_job]
        speeds = need / self.unit
        rising = speeds > _UNSEEN * speeds.max()
        stuck = gain <= max(STUCK, gain[rising].min())
        self.levels = np.where(stuck & (self.levels < 0), level, self.levels)
        gap = max(found.bound - found.theta, water_filling.ROUNDING)
        time = rows.time_left(found.form, found.duals, gap)
        self._time = np.minimum(self._time, time[groups.of_job])
        self._cuts.append(rows.cut(found.duals))
        self.last = found
        return None

    def _raise(self, need: Floats, end: float = math.inf) -> _Raise | Status:
        """Raise all jobs, to ``end`` at most; the solver's status if it has no answer."""
        before = None if self.last is None else self.last.rows
        rows = _rows(self.problem, need, self.floor, before)
        groups, valid = rows.valid.groups, rows.valid
        need, floor = groups.total(need) / groups.size, groups.total(self.floor) / groups.size
        for relaxed in RELAXED:
            form = rows.raising(need, floor * (1 - relaxed), end)
            answer = solve_form(form, limits=_left(self.limits, self.ends))
            if answer.status is not Status.INFEASIBLE:
                break
        if answer.values is None or answer.duals is None:
            return answer.status
        totals = np.clip(answer.values[:-1], 0.0, valid.most)
        reached = (valid.rate @ totals) / groups.size
        speed = need / rows.unit
        rising = speed > _UNSEEN * speed.max()
        theta = max(0.0, float(((reached - floor)[rising] / need[rising]).min()))
        return _Raise(theta, form, answer.duals, rows, totals, answer.backend)


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


def _verified(
    problem: AllocationProblem,
    needs: Needs,
    levels: Ints,
    last: _Raise,
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
        f"water-filling verifier: caps, and duals of LPs for levels beyond them ({last.backend})"
        if wrong is None
        else None,
        levels=levels.astype(float),
        notes=notes if wrong is None else (*notes, f"not proved: {wrong}"),
    )


def _unfinished(
    problem: AllocationProblem, needs: Needs, status: Status, last: _Raise | None, bound: float
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
