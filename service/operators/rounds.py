"""Training by plans that are made from its own measurements: FastT's loop (section 4).

A round carries out a plan for some steps, measures it, learns its costs, and plans again. A plan
whose steps take longer than those of the best so far is given up for that one. The loop ends when
the costs are stable, when planning gives a plan that has been measured, or after ``most`` rounds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stagewright.executor.measuring.operator_runs import compare_operators, observe
from stagewright.executor.programs.trace import Trace
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.formulations.operators.problem import Contention
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.operators.cost_book import CostBook, Drift
from stagewright.graphs.models.operators.step_graph import StepGraph


@dataclass(frozen=True, slots=True)
class TrainingRound:
    """A plan that was carried out.

    Attributes
    ----------
    predicted_seconds
        By the costs that it was planned with; 0 where nothing was known.
    measured_seconds
        The median of its steps.
    is_kept
        Whether no plan before it was faster.
    book, drift
        The costs after the round, and how much it changed them.
    """

    number: int
    plan: OperatorPlan
    predicted_seconds: float
    measured_seconds: float
    is_kept: bool
    book: CostBook
    drift: Drift


@dataclass(frozen=True, slots=True)
class TrainingRounds:
    """What is planned in each round, and when it ends.

    ``tolerance`` is the share by which costs may change and still be stable.
    """

    graph: StepGraph
    cluster: Cluster
    planner: str = "fastt"
    contention: Contention = "none"
    limits: Limits | None = None
    tolerance: float = 0.1
    most: int = 5

    def start(self) -> OperatorPlan | None:
        """The plan before anything is known: a device per replica, else devices filled in turn.

        None if neither fits in memory.
        """
        from stagewright.solvers.operators.planning import plan_operators

        graph, cluster = CostBook().priced(self.graph, self.cluster)
        alone = not any("@" in node.name for node in graph.nodes)
        for planner in ("single" if alone else "data-parallel", "m-topo"):
            found = plan_operators(graph, cluster, planner, self.contention)
            if found.plan is not None:
                return found.plan
        return None

    def run(
        self, first: OperatorPlan, measure: Callable[[OperatorPlan], Trace]
    ) -> Iterator[TrainingRound]:
        """The rounds; the last one that is kept has the best plan.

        Parameters
        ----------
        measure
            Carries out a plan for some steps.
        """
        plan, book, best = first, CostBook(), float("inf")
        measured: set[object] = set()
        for number in range(self.most):
            trace = measure(plan)
            times = compare_operators(plan, trace).iteration_seconds
            before = book
            book, drift = book.updated(observe(plan, trace), self.cluster)
            is_kept = times.measured <= best
            best = min(best, times.measured)
            measured.add(_placement(plan))
            yield TrainingRound(number, plan, times.predicted, times.measured, is_kept, book, drift)
            if before.computed and drift.is_stable(self.tolerance):
                return
            found = self._planned(book)
            if found is None or _placement(found) in measured:
                return
            plan = found

    def _planned(self, book: CostBook) -> OperatorPlan | None:
        from stagewright.solvers.operators.planning import plan_operators

        priced = book.priced(self.graph, self.cluster)
        return plan_operators(*priced, self.planner, self.contention, self.limits).plan


def _placement(plan: OperatorPlan) -> object:
    """What tells two placements apart: splits, devices and the order of operators."""
    return plan.splits, tuple((one.operator, one.device) for one in plan.operators)
