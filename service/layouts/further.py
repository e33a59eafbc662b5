"""What is found after the best layouts: stages that differ, less memory, better machines."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

from stagewright.executor.export.layouts import PLAN
from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.formulations.parallelism.document import LayoutBound
from stagewright.formulations.parallelism.estimate import Estimate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.units import format_bytes
from stagewright.service.layouts.problems import better_machines
from stagewright.service.layouts.requests import (
    FrontPoint,
    LayoutRequest,
    RefinedAnswer,
    RefinedRow,
    WhatIf,
)
from stagewright.solvers.parallelism.refining import (
    FoundLayouts,
    Recomputation,
    Refined,
    Refinement,
    refine,
)
from stagewright.solvers.parallelism.space import Space

PROVED_BY = "branch and bound over divisions, and closed bounds on any division"


@dataclass(frozen=True, slots=True)
class RefinedLayouts:
    """The answer; the best layout of all, if any fits, with the bound for its document."""

    answer: RefinedAnswer
    best: Estimate | None
    bound: LayoutBound | None


def refined_layouts(
    problem: TrainingProblem,
    space: Space,
    found: FoundLayouts,
    framework: str | None,
    accept: Callable[[Layout], bool],
    alike_class: str,
    stop: StopToken | None,
) -> RefinedLayouts:
    """The refinement of what a search has found.

    A plan of stages recomputes all blocks of a stage or none, other frameworks equally many of
    every stage. ``alike_class`` is what the search's bound speaks of.
    """
    done = refine(
        problem, space, found, recomputation=_recomputation(framework), accept=accept, stop=stop
    )
    answer = RefinedAnswer(
        proved_by=PROVED_BY,
        rows=tuple(_row(one) for one in done.best),
        plain_bound_seconds=done.plain_bound,
        bound_seconds=done.bound,
        plan_class=f"{alike_class}, and any blocks and recomputed blocks of every stage",
        examined=done.examined,
        wall_seconds=done.seconds,
    )
    return RefinedLayouts(answer, *_best(done, found, answer))


def _recomputation(framework: str | None) -> Recomputation:
    if framework is None:
        return "any"
    return "whole" if framework == PLAN else "alike"


def _best(
    done: Refinement, found: FoundLayouts, answer: RefinedAnswer
) -> tuple[Estimate | None, LayoutBound | None]:
    """The best layout of all, and its bound if it is a refined one."""
    alike = found.best[0] if found.best else None
    if not done.best or (alike is not None and done.best[0].estimate.seconds >= alike.seconds):
        return alike, None
    bound = LayoutBound(answer.bound_seconds, PROVED_BY, answer.plan_class)
    return done.best[0].estimate, bound


def _row(one: Refined) -> RefinedRow:
    return RefinedRow.of(
        one.estimate,
        layout=str(one.estimate.layout),
        before_seconds=one.before,
        bound_seconds=one.bound,
    )


Search = Callable[..., FoundLayouts]
"""The search of a request: of a problem, for so many layouts, with options."""

LESS_MEMORY = 0.93
"""From one point of the front to the next, the limit on memory shrinks at least by this factor."""


def front_of(
    search: Search, problem: TrainingProblem, stop: StopToken | None
) -> Iterator[FrontPoint]:
    """The fastest layout for less and less memory, from any amount to too little.

    One limit is what a device has. What is no faster than a later point is left out.
    """
    limit, has, last = inf, problem.fabric.memory_bytes, None
    while not is_stopped(stop):
        found = search(problem, 1, memory_bytes=limit, stop=stop)
        point = None
        if found.best:
            one = found.best[0]
            point = FrontPoint.of(one, limit_bytes=limit, layout=str(one.layout))
        if last is not None and (point is None or point.seconds > last.seconds * (1 + 1e-9)):
            yield last
        if point is None:
            return
        last, below = point, point.peak_bytes * LESS_MEMORY
        limit = has if below < has < limit and point.peak_bytes > has else below


MOST_STEPS = 1000  # e^72 as much memory as a device has


def smallest_of(
    search: Search, problem: TrainingProblem, stop: StopToken | None
) -> Iterator[FrontPoint]:
    """A layout that needs little more memory than a device has, where none fits in that.

    Its limit is the least, in steps of :data:`LESS_MEMORY`, in which one fits.
    """

    def fitting(steps: int) -> FrontPoint | None:
        limit = problem.fabric.memory_bytes / LESS_MEMORY**steps
        best = () if is_stopped(stop) else search(problem, 1, memory_bytes=limit, stop=stop).best
        return next((FrontPoint.of(x, limit_bytes=limit, layout=str(x.layout)) for x in best), None)

    none, some, found = 0, 1, fitting(1)
    while found is None and some < MOST_STEPS and not is_stopped(stop):
        none, some = some, 2 * some
        found = fitting(some)
    while found is not None and some - none > 1:
        middle = (none + some) // 2
        smaller = fitting(middle)
        if smaller is None:
            none = middle
        else:
            some, found = middle, smaller
    if found is not None:
        yield found


def states_too_large(request: LayoutRequest) -> str | None:
    """That states alone are more than all devices have, whatever the layout; None if not."""
    problem, has = request.problem, request.problem.fabric.memory_bytes
    needed = request.searched.least_bytes(problem)
    if needed <= has * (1 + RELATIVE_TOLERANCE):
        return None
    return (
        f"a device has {format_bytes(has)}; weights, gradients, the optimizer's state and the "
        f"reserve alone would need {format_bytes(needed)} on each of {problem.fabric.devices}"
    )


def least_too_large(problem: TrainingProblem, least: FrontPoint) -> str:
    """How much memory the smallest layout lacks, in words."""
    missing = least.peak_bytes - problem.fabric.memory_bytes
    return (
        f"a device has {format_bytes(problem.fabric.memory_bytes)}; {least.layout} would need "
        f"{format_bytes(least.peak_bytes)}, {format_bytes(missing)} more, and no layout much less"
    )


def what_if(search: Search, problem: TrainingProblem, stop: StopToken | None) -> Iterator[WhatIf]:
    """The fastest layouts on better machines."""
    for change, changed in better_machines(problem):
        if is_stopped(stop):
            return
        found = search(changed, 1, stop=stop)
        one = found.best[0] if found.best else None
        yield WhatIf(
            change=change,
            seconds=None if one is None else one.seconds,
            layout=None if one is None else str(one.layout),
        )
