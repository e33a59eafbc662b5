"""Progress reports of a planner in terms of the whole problem."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

from stagewright.formulations.forms.answers import OnProgress, Progress, silent
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.plan_class import EVERY_FINITE, EVERY_PLAN
from stagewright.solvers.pipelines.every_plan import every_plan_bounds

MakePlan = Callable[[Any], PipelinePlan]


def reporting(
    problem: PipelineProblem, on_progress: OnProgress, periodic: bool, make_plan: MakePlan
) -> OnProgress:
    """The callback for a planner's progress; it reports the initial bound at once."""
    if on_progress is silent:
        return silent
    reporter = Reporter(problem, on_progress, periodic, make_plan)
    reporter.begin()
    return reporter


@dataclass
class Reporter:
    """Reports the best plan so far and the bound on every plan to ``on_progress``.

    A planner runs several searches in sequence, each with its own clock and its own best plan. Its
    bounds are on smaller classes of plans; they are in the certificate and not reported here.
    """

    problem: PipelineProblem
    on_progress: OnProgress
    periodic: bool  # whether periodic plans are searched for
    make_plan: MakePlan  # makes the plan of a planner's proposal
    began: float = field(default_factory=monotonic)
    cost: float = math.inf
    bound: float = 0.0
    best: Callable[[], Any] | None = None

    def begin(self) -> None:
        """Report the bound before there is a plan."""
        wanted = EVERY_PLAN if self.periodic else EVERY_FINITE
        known = every_plan_bounds(self.problem)
        self.bound = max(one.seconds for one in known if one.plans.contains(wanted))
        self._report()

    def __call__(self, step: Progress) -> None:
        """Update the best plan from a planner's report and pass it on."""
        if step.objective is not None:
            if step.best is not None and step.objective <= self.cost:
                self.best = step.best
            self.cost = min(self.cost, step.objective)
        self._report()

    def _report(self) -> None:
        cost = None if self.cost == math.inf else self.cost
        seconds = monotonic() - self.began
        plan = None if self.best is None else partial(self._plan, self.best)
        self.on_progress(Progress(seconds, cost, min(self.bound, self.cost), plan))

    def _plan(self, made: Callable[[], Any]) -> PipelinePlan:
        return self.make_plan(made())
