"""Layouts whose stages differ: what refinement adds to the answer of a search."""

from collections.abc import Callable
from dataclasses import dataclass

from stagewright.executor.export.layouts import PLAN
from stagewright.formulations.forms.answers import StopToken
from stagewright.formulations.parallelism.document import LayoutBound
from stagewright.formulations.parallelism.estimate import Estimate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.service.layouts.requests import RefinedAnswer, RefinedRow
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
