"""MadPipe (Beaumont, Eyraud-Dubois, Shilova), with a local search and a joint search.

A dynamic program finds an allocation with one special device that may have several stages; then its
pattern is solved exactly. In addition to the paper, the best contiguous partition is a candidate, a
local search allows several stages on any device, and the joint search solves small cases exactly
and gives bounds for others.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.patterns.joint_patterns import ALLOCATIONS, JointPatterns
from stagewright.formulations.patterns.madpipe import StageAllocationProblem
from stagewright.formulations.patterns.one_f_one_b import period_bound
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, Stage
from stagewright.formulations.plans.plan_class import SEARCHED_ALLOCATIONS
from stagewright.solvers.patterns import madpipe
from stagewright.solvers.patterns.allocation_search import (
    AllocationMoves,
    disturbed,
    improve_allocation,
    interleaved,
)
from stagewright.solvers.patterns.joint_patterns import joint_optimum
from stagewright.solvers.planners.periodic.one_f_one_b_star import contiguous
from stagewright.solvers.planners.periodic.search import (
    OPTIMAL_GAP,
    PERIODIC_OPTIONS,
    FoundPattern,
    PeriodicSearch,
    distinct,
    interchangeable,
    longest_update,
    named_group,
    orders,
)
from stagewright.solvers.planners.steps.planner import SearchPlanner
from stagewright.solvers.planners.steps.proposal import Choices, NoPlan, PeriodicProposal

Stages = tuple[Stage, ...]

_JOINT_STAGES = 20_000  # pairs of stages and groups up to which the joint search is run
# Further allocations are computed at these fractions between the allocation's period and the best.
SHARES = (0.1, 0.25, 0.5, 0.75)
LONGEST = 2.0  # times the allocation's period, as the upper end if there is no plan yet
ROUNDS = (2, 3)  # of cyclically assigned stages
SEARCHES = 12  # further local searches, each from MOVES random moves away from the best plan
MOVES = 3
SEARCHING = 0.2  # share of the remaining time for local searches
_SCHEDULED = 4  # last allocations of each local search that are scheduled


def plan_madpipe(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress, choices: Choices
) -> PeriodicProposal | NoPlan:
    """MadPipe's allocation and pattern, or a better one found during the search."""
    search = PeriodicSearch(problem, limits, on_progress, choices)
    for step in (contiguous, _with_special, _rearranged, jointly):
        search.each_size(partial(step, search))
    return search.answer("with several stages on one device")


def _with_special(search: PeriodicSearch, size: int) -> None:
    """MadPipe with each distinct group as the special one.

    First with any pause, then with pauses no longer than that of the best plan.
    """
    for groups in orders(search.problem, size):
        for special in distinct(search.problem, groups):
            question = StageAllocationProblem(
                search.problem, groups, special, search.choices.periodic_recomputations
            )
            _by_madpipe(search, question)
            if search.best is not None and search.best.asked.pause_seconds > 0:
                most = max(search.best.asked.pause_seconds, longest_update(search.problem))
                _by_madpipe(search, replace(question, most_update_seconds=most))


def _by_madpipe(search: PeriodicSearch, question: StageAllocationProblem) -> None:
    """Schedule the best allocation, and others at longer periods.

    The period of an allocation is a lower bound that its pattern may not attain, so allocations at
    periods between this bound and the best plan are scheduled as well.
    """
    if search.left() <= 0:
        search.settled = False
        return
    found = madpipe.least_period(question, search.limits_left())
    search.settled &= found.bound == found.period
    if found.stages is None:
        return
    search.schedule(found.stages)
    for share in SHARES:
        best = search.best_period()
        if found.period < best * (1 - OPTIMAL_GAP) and search.left() > 0:
            longest = min(best, LONGEST * found.period)
            period = found.period + share * (longest - found.period)
            stages = madpipe.allocate(question, period, search.limits_left())
            if stages is not None:
                search.schedule(stages)


def _rearranged(search: PeriodicSearch, size: int) -> None:
    """Local searches in which any group may have several stages."""
    names = tuple(named_group(search.problem, group) for group in orders(search.problem, size)[0])
    moves, end = (
        AllocationMoves(names, search.choices.periodic_modes),
        search.left() * (1 - SEARCHING),
    )
    for attempt, start in enumerate(_starts(search, names, moves)):
        left = search.left() - end
        if left <= 0:
            return
        limits = replace(search.limits, seconds=left, seed=search.limits.seed + attempt)
        target = search.bound(size)
        steps = list(improve_allocation(search.figures, moves, start, target, limits))
        for stages, _, bound in steps[::-1][:_SCHEDULED]:
            if bound < search.ceiling():
                search.schedule(stages)


def _starts(
    search: PeriodicSearch, names: tuple[tuple[str, ...], ...], moves: AllocationMoves
) -> Iterator[Stages]:
    """The best plan, cyclically assigned stages, and random perturbations of the best plan.

    Their number is fixed, for reproducible answers.
    """
    rng = random.Random(search.limits.seed)
    if search.best is not None and len(search.best.stages[0].devices) == len(names[0]):
        yield search.best.stages
    for rounds in ROUNDS:
        for there_and_back in (False, True):
            yield interleaved(search.figures, names, rounds, there_and_back)
    for _ in range(SEARCHES):
        if search.best is not None and len(search.best.stages[0].devices) == len(names[0]):
            yield disturbed(moves, search.best.stages, MOVES, rng)


def jointly(search: PeriodicSearch, size: int) -> None:
    """The joint search, which solves small cases exactly and gives a bound for larger ones."""
    groups = orders(search.problem, size)[0]
    stages = (
        len(groups)
        * len(search.choices.periodic_recomputations)
        * len(search.problem.chain) ** 2
        / 2
    )
    if stages > _JOINT_STAGES or search.left() <= 0:
        return
    known = None if search.best is None else (search.best.stages, search.best.pattern)
    question = JointPatterns(search.problem, groups, search.choices.periodic_recomputations)
    answer = joint_optimum(question, search.limits_left(), incumbent=known)
    if answer.stages is not None and answer.pattern is not None:
        asked = search.figures.of(answer.stages)
        low = period_bound(asked)
        search.consider(FoundPattern(answer.stages, asked, answer.pattern, low, low))
    if not search.choices.offload and (size == 1 or interchangeable(search.problem, size)):
        recompute = search.choices.periodic_recomputations
        plans = replace(SEARCHED_ALLOCATIONS, recompute=recompute, equal_groups=(size,))
        search.bounds[size].append(Bound(answer.bound, ALLOCATIONS, "problem", plans))


PLANNER = SearchPlanner(
    "madpipe",
    "periodic plans for little memory: some devices have several stages; asynchronous, two "
    "versions of the weights",
    "Beaumont et al., ScaDL 2022",
    plan_madpipe,
    PERIODIC_OPTIONS,
)
