"""Answers ``max theta`` over all jobs exactly, with few groups of them (see ``polytope``).

Jobs of one kind whose needs differ are grouped by need and divide what the group gets in
proportion. That restricts the allocations only where a group's time is scarce; the duals say
where, and those groups are split until the bound, which holds for every allocation, is met.
"""

import math
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from stagewright.formulations.allocation import Allocation, AllocationProblem, throughput
from stagewright.formulations.duality import weak_duality_bound
from stagewright.formulations.forms import Bools, Floats, Ints, Limits, Status
from stagewright.formulations.policies.levels import level_program
from stagewright.formulations.polytope import Groups, group_by, polytope
from stagewright.solvers.backend import solve

TOLERANCE = 1e-9  # relative distance to the bound at which the answer counts as optimal
SCARCE = 1e-9  # of a dual: rounding
FIRST_RATIO = 1.5  # between the needs of one group, at first
FEW = 64  # jobs in a group that is split into its single needs at once


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """``theta`` is reached by ``allocation``; no allocation reaches more than ``bound``.

    ``holding`` marks the jobs whose row has a positive dual: they hold theta in every optimum.
    ``allocation`` is None and ``theta`` nan unless the status is optimal.
    """

    status: Status
    theta: float
    bound: float
    allocation: Allocation | None
    holding: Bools
    seconds: float
    backend: str


def max_level(
    problem: AllocationProblem,
    need: Floats,
    floor: Floats | None = None,
    *keys: Floats | Ints,
    limits: Limits | None = None,
    tolerance: float = TOLERANCE,
    backend: str | None = None,
) -> Level:
    """Maximise theta such that throughput(m, X) >= floor_m + theta * need_m for every job.

    Parameters
    ----------
    need, floor
        Steps per second, by job. Without a floor every need is positive; with one, some are.
    keys
        Numbers by job; jobs that differ in one are never grouped.
    tolerance
        Relative gap at which the answer is good enough.
    """
    limits = limits or Limits(seconds=math.inf)
    began = perf_counter()
    ratio = np.full(len(problem), FIRST_RATIO if floor is None else 1.0)
    floors = np.zeros(len(problem)) if floor is None else floor
    while True:
        share = need if floor is None else None
        groups = group_by(problem, _bucket(need, ratio), floors, *keys, share=share)
        left = Limits(limits.seconds - (perf_counter() - began), limits.threads, limits.seed)
        level, scarce = _solve(problem, groups, need, floors, left, backend)
        within = level.bound - level.theta <= tolerance * abs(level.bound)
        if level.status is not Status.OPTIMAL or within or not scarce.any():
            return _timed(level, began)
        few = groups.size[groups.of_job] <= FEW
        finer = np.where(few, 1.0, ratio**0.25)
        ratio = np.where(scarce[groups.of_job], finer, ratio)


def _timed(level: Level, began: float) -> Level:
    return Level(
        level.status,
        level.theta,
        level.bound,
        level.allocation,
        level.holding,
        perf_counter() - began,
        level.backend,
    )


def _bucket(need: Floats, ratio: Floats) -> Floats:
    """A number for each job; needs of one number are within ``ratio`` of each other."""
    coarse = ratio > 1 + 1e-6
    safe = np.where(coarse, ratio, 2.0)
    with np.errstate(divide="ignore"):
        return np.where(coarse, -1e9 - np.floor(np.log(need) / np.log(safe)), need)


def _solve(
    problem: AllocationProblem,
    groups: Groups,
    need: Floats,
    floor: Floats,
    limits: Limits,
    backend: str | None,
) -> tuple[Level, Bools]:
    """One linear program, and the groups of unequal needs whose time is scarce."""
    valid = polytope(problem, groups)
    program = level_program(
        valid, groups.total(need), groups.total(floor), _most(problem, need, floor)
    )
    answer = solve(program.form, backend, limits)
    nobody = np.zeros(len(problem), dtype=bool)
    if answer.values is None or answer.duals is None:
        level = Level(answer.status, math.nan, math.nan, None, nobody, 0.0, answer.backend)
        return level, np.zeros(len(groups), dtype=bool)
    allocation = valid.invert(np.clip(answer.values[:-1], 0.0, valid.most))
    reached = throughput(problem, allocation) - floor
    theta = float((reached[need > 0] / need[need > 0]).min())
    time, asked = answer.duals[: len(groups)], answer.duals[-len(groups) :]
    unequal = groups.peak * groups.size > 1 + 1e-9
    level = Level(
        answer.status,
        theta,
        -weak_duality_bound(program.relaxed, answer.duals),
        allocation,
        (asked > SCARCE)[groups.of_job],
        0.0,
        answer.backend,
    )
    return level, unequal & (time < -SCARCE)


def _most(problem: AllocationProblem, need: Floats, floor: Floats) -> float:
    """A level that no allocation exceeds: each job at its best all of the time."""
    table = problem.table
    best = table.alone.max(axis=1)
    for side, kinds in enumerate((table.first, table.second)):
        np.maximum.at(best, kinds, table.paired[:, side])
    asks = need > 0
    return float(((best[problem.kind] - floor)[asks] / need[asks]).min())
