"""Rounds of training by plans of operators."""

from dataclasses import dataclass

from stagewright.executor.measuring.operator_runs import compare_operators, observe
from stagewright.executor.measuring.pairs import Pair
from stagewright.executor.programs.trace import Trace
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.formulations.operators.problem import Contention
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.operators.cost_book import CostBook
from stagewright.graphs.models.operators.step_graph import StepGraph
from stagewright.service.rounds import TrainingRounds


@dataclass(frozen=True, slots=True)
class OperatorRounds(TrainingRounds[OperatorPlan, CostBook]):
    """Rounds of a graph whose operators have no times before they have run."""

    graph: StepGraph
    cluster: Cluster
    planner: str = "fastt"
    contention: Contention = "none"
    limits: Limits | None = None
    tolerance: float = 0.1
    most: int = 5

    @property
    def costs(self) -> CostBook:
        """Nothing is known."""
        return CostBook()

    def start(self) -> OperatorPlan | None:
        """The plan before anything is known: a device per replica, else devices filled in turn."""
        from stagewright.solvers.operators.planning import plan_operators

        graph, cluster = self.costs.priced(self.graph, self.cluster)
        alone = not any("@" in node.name for node in graph.nodes)
        for planner in ("single" if alone else "data-parallel", "m-topo"):
            found = plan_operators(graph, cluster, planner, self.contention)
            if found.plan is not None:
                return found.plan
        return None

    def learned(
        self, costs: CostBook, plan: OperatorPlan, trace: Trace
    ) -> tuple[CostBook, Pair, bool]:
        """The book with what was measured; it is not stable after the first run."""
        seconds = compare_operators(plan, trace).iteration_seconds
        book, drift = costs.updated(observe(plan, trace), self.cluster)
        return book, seconds, bool(costs.computed) and drift.is_stable(self.tolerance)

    def planned(self, costs: CostBook) -> OperatorPlan | None:
        """The planner's plan."""
        from stagewright.solvers.operators.planning import plan_operators

        priced = costs.priced(self.graph, self.cluster)
        return plan_operators(*priced, self.planner, self.contention, self.limits).plan

    @staticmethod
    def work(plan: OperatorPlan) -> object:
        """Splits, devices and the order of operators."""
        return plan.splits, tuple((one.operator, one.device) for one in plan.operators)
