"""Layouts whose stages differ: what refinement adds to the answer of a search."""

from collections.abc import Callable
from dataclasses import dataclass

from stagewright.executor.export.layouts import PLAN
from stagewright.formulations.forms.answers import StopToken
from stagewright.formulations.parallelism.document import LayoutBound
from stagewright.formulations.parallelism.estimate import Estimate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.service.answers import Answer, Finite
from stagewright.solvers.parallelism.refining import (
    FoundLayouts,
    Recomputation,
    Refined,
    Refinement,
    refine,
)
from stagewright.solvers.parallelism.space import Space

PROVED_BY = "branch and bound over divisions, and closed bounds on any division"


class RefinedRow(Answer):
    """A layout with blocks and recomputed blocks of every stage.

    ``before_seconds`` is its time with stages that are alike, None if that is not among the best.
    No blocks by stage, with the fewest recomputed of each that fit, make it faster than
    ``bound_seconds``.
    """

    layout: str
    seconds: float
    before_seconds: Finite
    bound_seconds: float
    mfu: float
    peak_bytes: float


class RefinedAnswer(Answer):
    """The best refined layouts, if any is faster, and bounds on all pipelines of any division.

    ``plain_bound_seconds`` is of pipelines with one stage on a rank and the fewest recomputed
    blocks of each stage that fit; ``bound_seconds`` of interleaved ones too, with any
    recomputation. ``examined`` layouts were divided.
    """

    rows: tuple[RefinedRow, ...]
    plain_bound_seconds: float
    bound_seconds: float
    proved_by: str = PROVED_BY
    plan_class: str
    examined: int
    wall_seconds: float


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
        problem,
        space,
        found,
        recomputation=_recomputation(framework),
        accept=accept,
        stop=stop,
    )
    answer = RefinedAnswer(
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
    """The best layout; its bound where it is a refined one."""
    alike = found.best[0] if found.best else None
    if not done.best or (alike is not None and done.best[0].estimate.seconds >= alike.seconds):
        return alike, None
    bound = LayoutBound(answer.bound_seconds, PROVED_BY, answer.plan_class)
    return done.best[0].estimate, bound


def _row(one: Refined) -> RefinedRow:
    return RefinedRow(
        layout=str(one.estimate.layout),
        seconds=one.estimate.seconds,
        before_seconds=one.before,
        bound_seconds=one.bound,
        mfu=one.estimate.mfu,
        peak_bytes=one.estimate.peak_bytes,
    )
