"""Solves ``max theta`` over all jobs exactly, with few groups of them (see ``polytope``).

Groups of jobs with different needs, split until grouping no longer costs anything.

Jobs of a group divide what it gets in proportion to their needs. That restricts the allocations
only where a group's time is scarce; the bound of an answer holds for every allocation, and the
groups whose time is scarce are split until the two meet.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Generic, TypeVar

import numpy as np

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, throughput
from stagewright.formulations.clusters.policies.throughput import level_program
from stagewright.formulations.clusters.polytope import Groups, group_by, polytope
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.forms.models import weak_duality_bound
from stagewright.graphs.documents.arrays import Bools, Floats
from stagewright.solvers.backends.backend import UnknownStatusError, solve

TOLERANCE = 1e-9  # relative distance to the bound at which an answer is good enough
_SCARCE = 1e-9  # of a dual: rounding
FIRST_RATIO = 1.5  # between the needs of one group, at first
FEW = 64  # jobs in a group that is split into its single needs at once

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class LevelAttempt(Generic[T]):
    """An answer over groups, its relative ``gap`` to the bound, and groups whose time is scarce.

    ``failed`` says that there is none, for want of time.
    """

    answer: T
    gap: float
    scarce: Bools
    failed: bool = False


def split_until_proved(
    problem: AllocationProblem,
    need: Floats,
    attempt: Callable[[Groups], LevelAttempt[T]],
    tolerance: float = TOLERANCE,
) -> T:
    """``attempt``'s answer over groups as coarse as its bound allows; ``need`` is by job.

    If a finer attempt fails, the answer of the one before stands.
    """
    ratio = np.full(len(problem), FIRST_RATIO)
    before: LevelAttempt[T] | None = None
    while True:
        groups = groups_by_need(problem, need, ratio)
        found = attempt(groups)
        if found.failed:
            return found.answer if before is None else before.answer
        before = found
        scarce = found.scarce & (groups.peak * groups.size > 1 + 1e-9)
        if found.gap <= tolerance or not scarce.any():
            return found.answer
        few = groups.size[groups.of_job] <= FEW
        ratio = np.where(scarce[groups.of_job], np.where(few, 1.0, ratio**0.25), ratio)


def groups_by_need(problem: AllocationProblem, need: Floats, ratio: Floats) -> Groups:
    """Jobs of a kind whose needs are within ``ratio`` of each other; without need, one group."""
    share = np.where(need > 0, need, 1.0)
    groups = group_by(problem, _bucket(need, ratio), share=share)
    # A job with more than half of its group could not pair with the others as it would alone.
    lopsided = (groups.peak > 0.5 + 1e-12) & (groups.size > 1)
    if lopsided.any():
        ratio = np.where(lopsided[groups.of_job], 1.0, ratio)
        groups = group_by(problem, _bucket(need, ratio), share=share)
    return groups


def _bucket(need: Floats, ratio: Floats) -> Floats:
    coarse = (ratio > 1 + 1e-6) & (need > 0)
    step = np.log(np.where(coarse, ratio, 2.0))
    level = np.floor(np.log(np.where(coarse, need, 1.0)) / step)
    return np.where(coarse, -1e9 - level, need)


def scarce_time(groups: Groups, duals: Floats) -> Bools:
    """Groups whose row of time, among the first of a polytope, has a dual."""
    return np.asarray(np.abs(duals[: len(groups)]) > _SCARCE)


def all_scarce(groups: Groups) -> Bools:
    """Mark all groups as scarce, after a solve over the groups failed."""
    return np.ones(len(groups), dtype=bool)


ROUNDING = 1e-6  # relative: what solvers' tolerances leave


@dataclass(frozen=True, slots=True, eq=False)
class MaxLevel:
    """``theta`` is reached by ``allocation``; no allocation reaches more than ``bound``.

    ``allocation`` is None and ``theta`` nan where there is none. One more accelerator of a type
    adds at most its ``price`` to ``bound``, shape (types,).
    """

    status: Status
    theta: float
    bound: float
    allocation: Allocation | None
    seconds: float
    backend: str
    price: Floats


def max_level(
    problem: AllocationProblem,
    need: Floats,
    *,
    limits: Limits | None = None,
    tolerance: float = TOLERANCE,
    backend: str | None = None,
) -> MaxLevel:
    """Maximise theta such that throughput(m, X) >= theta * need_m for every job.

    ``need``: steps per second, positive, by job. ``tolerance``: relative gap at which the answer is
    good enough.
    """
    limits = limits or Limits(seconds=math.inf)
    began = perf_counter()

    def attempt(groups: Groups) -> LevelAttempt[MaxLevel]:
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
) -> LevelAttempt[MaxLevel]:
    """Solve one linear program; also return the groups whose time is scarce."""
    valid = polytope(problem, groups)
    # No job can have more than its best rate all of the time.
    most, free = float((problem.best_rates() / need).min()), np.zeros(len(problem.table.counts))
    program = level_program(valid, groups.total(need), most)
    answer = solve(program.form, backend, limits)
    if answer.values is None or answer.duals is None:
        level = MaxLevel(answer.status, math.nan, math.nan, None, 0.0, answer.backend, free)
        return LevelAttempt(level, math.inf, all_scarce(groups), failed=True)
    allocation = valid.invert(np.clip(answer.values[:-1], 0.0, valid.most), all_served=True)
    theta = float((throughput(problem, allocation) / need).min())
    bound = -weak_duality_bound(program.relaxed, answer.duals) * program.unit
    gap = (bound - theta) / abs(bound) if bound else 0.0
    # The optimum is of the program by groups; the bound says how good it is for the jobs.
    status = Status.OPTIMAL if gap <= max(tolerance, ROUNDING) else Status.FEASIBLE
    price = valid.prices(answer.duals) * program.unit
    level = MaxLevel(status, theta, bound, allocation, 0.0, answer.backend, price)
    return LevelAttempt(level, gap, scarce_time(groups, answer.duals))
