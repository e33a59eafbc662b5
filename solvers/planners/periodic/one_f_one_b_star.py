"""1F1B* on the best contiguous partition (MadPipe 4.1)."""

import math
from dataclasses import replace
from functools import partial

from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.patterns.madpipe import StageAllocationProblem
from stagewright.formulations.patterns.one_f_one_b import (
    least_period,
    one_f_one_b_star,
    period_bound,
)
from stagewright.formulations.patterns.periodic_bounds import least_pause
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.solvers.patterns.madpipe import least_period as least_allocation_period
from stagewright.solvers.planners.periodic.search import (
    OPTIMAL_GAP,
    PERIODIC_OPTIONS,
    FoundPattern,
    Groups,
    PeriodicSearch,
    interchangeable,
    longest_update,
    orders,
)
from stagewright.solvers.planners.steps.planner import SearchPlanner
from stagewright.solvers.planners.steps.proposal import Choices, NoPlan, PeriodicProposal


def plan_one_f_one_b_star(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress, choices: Choices
) -> PeriodicProposal | NoPlan:
    """The shortest iteration over all contiguous partitions, with one stage per group."""
    search = PeriodicSearch(problem, limits, on_progress, choices)
    search.each_size(partial(contiguous, search))
    return search.answer("with one stage on every device")


def contiguous(search: PeriodicSearch, size: int) -> None:
    """1F1B* on the best contiguous partitions.

    The first has the least period with any pause. Further ones have shorter and shorter pauses,
    until these cannot compensate for the longer periods.
    """
    floor = max(least_pause(search.problem, size), longest_update(search.problem))
    for groups in orders(search.problem, size):
        question = StageAllocationProblem(
            search.problem, groups, None, search.choices.periodic_recomputations
        )
        pause = math.inf
        while pause > floor * (1 + OPTIMAL_GAP) and search.left() > 0:
            most = max(floor, pause * (1 - OPTIMAL_GAP))
            found = least_allocation_period(
                replace(question, most_update_seconds=most), search.limits_left()
            )
            search.settled &= found.bound == found.period and is_plain(search, groups)
            if found.stages is None:
                break
            pause = _one_f_one_b(search, found.stages)
            if search.problem.microbatches * found.bound + floor >= search.ceiling():
                break


def _one_f_one_b(search: PeriodicSearch, stages: tuple[Stage, ...]) -> float:
    """Consider the pattern of 1F1B* for stages with a group each; returns their pause."""
    asked = search.figures.of(stages)
    period = least_period(asked)
    if period < math.inf:
        # With all-reduces 1F1B* is not proved to be the best pattern.
        pattern, low = one_f_one_b_star(asked, period), period_bound(asked)
        search.consider(FoundPattern(stages, asked, pattern, period, low))
    return asked.pause_seconds


def is_plain(search: PeriodicSearch, groups: Groups) -> bool:
    """Whether any other groups, in any order, would do the same, without offloading."""
    return not search.choices.offload and interchangeable(search.problem, len(groups[0]))


PLANNER = SearchPlanner(
    "1f1b-star",
    "the best periodic plan with a stage on every device; asynchronous, two versions of the "
    "weights",
    "MadPipe 4.1",
    plan_one_f_one_b_star,
    PERIODIC_OPTIONS,
)
