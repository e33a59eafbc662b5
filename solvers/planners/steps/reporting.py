"""Progress reports of a planner in terms of the whole problem."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

from stagewright.formulations.checking.certificates import gap
from stagewright.formulations.forms.answers import GapStop, OnProgress, Progress, silent
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.plan_class import EVERY_FINITE, EVERY_PLAN, PlanClass
from stagewright.solvers.planners.steps.class_bounds import ClassBounds
from stagewright.solvers.planners.steps.proposal import class_of_proposal

_MakePlan = Callable[[Any], PipelinePlan]


def reporting(
    bounds: ClassBounds,
    on_progress: OnProgress,
    periodic: bool,
    make_plan: _MakePlan,
    target: GapStop,
) -> OnProgress:
    """The callback for a planner's progress; it reports the initial bound at once."""
    if on_progress is silent and target.gap == 0:
        return silent
    reporter = Reporter(
        bounds, on_progress, make_plan, target, EVERY_PLAN if periodic else EVERY_FINITE
    )
    reporter.report()
    return reporter


@dataclass
class Reporter:
    """Reports the best plan so far, with the bound on its class, to ``on_progress``.

    A planner runs several searches in sequence, each with its own clock and its own best plan. The
    bound improves while the best plan stays in its class, and may fall when another class has a
    better plan. ``target`` is reached once the gap is small enough and the plan is checked.
    """

    bounds: ClassBounds
    on_progress: OnProgress
    make_plan: _MakePlan
    target: GapStop
    plans: PlanClass  # of the best plan; before there is one, of all that are searched
    began: float = field(default_factory=monotonic)
    cost: float = math.inf
    best: Callable[[], Any] | None = None
    best_cost: float = math.inf  # of ``best``; ``cost`` may be of a plan that is not at hand

    def __call__(self, step: Progress) -> None:
        """Update the best plan and the bounds from a planner's report and pass it on."""
        if step.plans is not None:
            self.bounds.report([(step.plans, step.bound)])
        if step.objective is not None:
            self.cost = min(self.cost, step.objective)
        better = self._keep(step)
        self.report()
        if better:
            self._tighten()

    def report(self) -> None:
        """Report the best plan and the bound."""
        cost = None if self.cost == math.inf else self.cost
        bound = self.bounds.best(self.plans, self.cost)
        plan = None if self.best is None else partial(self._plan, self.best)
        seconds = monotonic() - self.began
        self.on_progress(Progress(seconds, cost, bound, plan, self.plans))
        if not self.target.reached and self.best is not None:
            self._aim(self.best, self.bounds.best(self.plans, self.best_cost))

    def _tighten(self) -> None:
        """Report a better bound on the class of the best plan, if the relaxation has one."""
        known = self.bounds.best(self.plans, self.best_cost)
        self.bounds.relaxed(self.plans, self.best_cost)
        if self.bounds.best(self.plans, self.best_cost) > known:
            self.report()

    def _keep(self, step: Progress) -> bool:
        """Keep the plan of a report, if it is at hand and none is better."""
        if step.best is None or step.objective is None or step.objective > self.best_cost:
            return False
        proposal = step.best()
        self.best, self.best_cost = step.best, step.objective
        self.plans = class_of_proposal(proposal)
        whole = [bound for bound in proposal.bounds if bound.scope == "problem"]
        self.bounds.report((bound.plans, bound.seconds) for bound in whole)
        return True

    def _aim(self, best: Callable[[], Any], bound: float) -> None:
        """Say that the gap is reached, after a check of the plan."""
        if self.target.gap > 0 and gap(self.best_cost, bound) <= self.target.gap:
            self._plan(best)
            self.target.reached = True

    def _plan(self, made: Callable[[], Any]) -> PipelinePlan:
        return self.make_plan(made())
