"""Rounds of training by plans of pipelines: profile, plan, run, compare, plan again."""

from dataclasses import dataclass
from math import inf

from stagewright.executor.measuring.compare import Comparison, compare, correct
from stagewright.executor.measuring.pairs import Pair
from stagewright.executor.programs.trace import Trace
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.machines.parts import with_slower_links
from stagewright.graphs.models.chain import Chain
from stagewright.service.pipelines.requests import PlanRequest
from stagewright.service.rounds import TrainingRounds


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """A profile and links, corrected by all runs so far; the least measured seconds of a step."""

    chain: Chain
    cluster: Cluster
    seconds: float = inf


@dataclass(frozen=True, slots=True)
class PipelineRounds(TrainingRounds[PipelinePlan, PipelineCosts]):
    """Rounds of a profiled model; the first plan is that of the profile.

    A plan that promises less than ``tolerance`` over the fastest run is not tried.
    """

    request: PlanRequest
    tolerance: float = 0.1
    most: int = 5

    @property
    def costs(self) -> PipelineCosts:
        """Those of the request."""
        return PipelineCosts(self.request.chain, self.request.cluster)

    def start(self) -> PipelinePlan | None:
        """The plan of the profile."""
        return self.planned(self.costs)

    def learned(
        self, costs: PipelineCosts, plan: PipelinePlan, trace: Trace
    ) -> tuple[PipelineCosts, Pair, bool]:
        """Compute times by stage, and all links by how long transfers took; never stable."""
        found = compare(plan, trace)
        seconds = found.iteration_seconds
        learned = PipelineCosts(
            correct(costs.chain, plan, trace),
            with_slower_links(costs.cluster, _slowdown(found)),
            min(costs.seconds, seconds.measured),
        )
        return learned, seconds, False

    def planned(self, costs: PipelineCosts) -> PipelinePlan | None:
        """The planner's plan, if it is fast enough to be tried."""
        from stagewright.service.pipelines.planning import plan

        learned = {"chain": costs.chain, "cluster": costs.cluster}
        given = {name: getattr(self.request, name) for name in self.request.model_fields_set}
        found = plan(PlanRequest(**given | learned))
        cost = found.result.cost
        promises = cost is not None and cost < costs.seconds * (1 - self.tolerance)
        return found.plan if promises else None

    @staticmethod
    def work(plan: PipelinePlan) -> object:
        """Stages, devices and the order of actions."""
        order = None if plan.is_periodic else [(one.device, one.action) for one in plan.actions]
        return repr((plan.stages, order))


def _slowdown(found: Comparison) -> float:
    """How much longer transfers took than planned, waits for late receivers left out."""
    if found.explanation is None:
        return 1.0
    for cause in found.explanation.causes:
        if cause.name == "transfers" and cause.work is not None and cause.work.ratio:
            return cause.work.ratio
    return 1.0
