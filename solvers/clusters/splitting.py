"""Groups of jobs with different needs, split until grouping no longer costs anything.

Jobs of a group divide what it gets in proportion to their needs. That restricts the allocations
only where a group's time is scarce; the bound of an answer holds for every allocation, and the
groups whose time is scarce are split until the two meet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.polytope import Groups, group_by
from stagewright.graphs.documents.arrays import Bools, Floats

TOLERANCE = 1e-9  # relative distance to the bound at which an answer is good enough
_SCARCE = 1e-9  # of a dual: rounding
FIRST_RATIO = 1.5  # between the needs of one group, at first
FEW = 64  # jobs in a group that is split into its single needs at once

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Attempt(Generic[T]):
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
    attempt: Callable[[Groups], Attempt[T]],
    tolerance: float = TOLERANCE,
) -> T:
    """``attempt``'s answer over groups as coarse as its bound allows; ``need`` is by job.

    If a finer attempt fails, the answer of the one before stands.
    """
    ratio = np.full(len(problem), FIRST_RATIO)
    before: Attempt[T] | None = None
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
