"""A plan at once, while the kernels of all others are compiled."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from stagewright.formulations.forms.answers import GapStop, Limits, OnProgress, Progress, silent
from stagewright.formulations.pipelines.bounds.every_plan import why_nothing_fits
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.solvers.planners.baselines.dp import plan_dp
from stagewright.solvers.planners.baselines.gpipe import plan_gpipe
from stagewright.solvers.planners.baselines.hetpipe import plan_hetpipe
from stagewright.solvers.planners.steps.proposal import Proposal

WITHOUT_KERNELS = (plan_gpipe, plan_hetpipe, plan_dp)
SECONDS = 1.0  # for each of them


@dataclass
class FirstPlan:
    """Told of every kernel that is compiled, it reports a checked plan once, then the kernel.

    ``certified`` checks and certifies a proposal without kernels; None: no plan is made. A plan
    within the gap of ``target`` reaches it, and no kernel is reported.
    """

    problem: PipelineProblem
    on_progress: OnProgress
    target: GapStop
    certified: Callable[[Proposal], PipelinePlan] | None
    began: float = field(default_factory=monotonic)
    proposal: Proposal | None = None
    kernels: int = 0

    def __call__(self, kernel: str) -> None:
        """Report that ``kernel`` is compiled; before the first, a plan."""
        self.kernels += 1
        if self.kernels == 1 and self.certified and why_nothing_fits(self.problem) is None:
            self._plan(self.certified)
        if self.target.reached:
            return
        seconds = monotonic() - self.began
        self.on_progress(Progress(seconds, None, -math.inf, doing=f"compiling {kernel}"))

    def _plan(self, certified: Callable[[Proposal], PipelinePlan]) -> None:
        limits = Limits(seconds=SECONDS)
        made = (run(self.problem, limits, silent) for run in WITHOUT_KERNELS)
        self.proposal = next((one for one in made if isinstance(one, Proposal)), None)
        if self.proposal is None:
            return
        plan = certified(self.proposal)
        assert plan.certificate is not None
        proof, seconds = plan.certificate, monotonic() - self.began
        self.on_progress(
            Progress(seconds, proof.cost_seconds, proof.bound_seconds, lambda: plan, proof.plans)
        )
        self.target.reached = self.target.gap > 0 and proof.gap <= self.target.gap
