"""What a planner tells while it works, in terms of the whole problem."""

import math
from dataclasses import dataclass, field
from time import monotonic

from stagewright.formulations.forms import OnProgress, Progress, silent
from stagewright.formulations.pipeline import PipelineProblem
from stagewright.solvers.relaxation import fill_and_drain_bound, load_bound


def reporting(problem: PipelineProblem, on_progress: OnProgress, periodic: bool) -> OnProgress:
    """What a planner is to report to, if anybody listens; tells at once what is known before."""
    if on_progress is silent:
        return silent
    reporter = Reporter(problem, on_progress, periodic)
    reporter.begin()
    return reporter


@dataclass
class Reporter:
    """Passes the best plan and the best bound so far on to ``on_progress``.

    Planners report one search after the other, each with its own clock and its own best plan; their
    bounds hold for every plan of the problem, or are 0.
    """

    problem: PipelineProblem
    on_progress: OnProgress
    periodic: bool  # planners report periods then, not iterations
    began: float = field(default_factory=monotonic)
    cost: float = math.inf
    bound: float = 0.0

    def begin(self) -> None:
        """Tell what is known before there is a plan."""
        self.bound = 0.0 if self.periodic else load_bound(self.problem)
        self._report()

    def __call__(self, step: Progress) -> None:
        """Take a planner's step into account."""
        scale = self.problem.microbatches if self.periodic else 1
        if step.objective is not None:
            self._offer(step.objective * scale)
        self.bound = max(self.bound, step.bound * scale)
        self._report()

    def _offer(self, cost: float) -> None:
        if self.cost == math.inf and not self.periodic:
            # Shorter plans hardly change this bound: its tables are filled once.
            self.bound = max(self.bound, fill_and_drain_bound(self.problem, cost))
        self.cost = min(self.cost, cost)

    def _report(self) -> None:
        cost = None if self.cost == math.inf else self.cost
        seconds = monotonic() - self.began
        self.on_progress(Progress(seconds, cost, min(self.bound, self.cost)))
