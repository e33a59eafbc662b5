"""The placement of an operator graph with the least latency, and a bound on it.

Topological orders are divided into calls and host segments that follow each other, which is best
for chains; annealing improves the best of them; paths of the graph give a bound; and CP-SAT closes
the gap that is left, if there is time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from ortools.sat.python import cp_model

from stagewright.formulations.dags.latency import Home, LatencyProblem
from stagewright.formulations.dags.latency_bounds import PathBound
from stagewright.formulations.forms.answers import (
    Limits,
    OnProgress,
    Progress,
    Status,
    settled,
    silent,
)
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.solvers.backends.cpsat import run_model
from stagewright.solvers.dags.latency_model import LatencyModel
from stagewright.solvers.dags.latency_search import LatencySearch

PATHS, PROGRAM = "paths cut into calls", "CP-SAT over all placements"
LEAST = 1e-9  # relative gap of an optimal answer
SHARE = 0.5  # of the time for annealing


@dataclass(frozen=True, slots=True, eq=False)
class LatencyResult:
    """The best placement found, and a bound on the latency of every one (seconds).

    ``home`` is that of `LatencyProblem.evaluate`; None if nothing was found.
    """

    home: Home | None
    cost: float | None
    bound: float
    proved_by: str
    status: Status
    seconds: float

    @property
    def gap(self) -> float | None:
        """(cost - bound) / cost."""
        if self.cost is None:
            return None
        return (self.cost - self.bound) / self.cost if self.cost > self.bound else 0.0


def place_for_latency(
    problem: LatencyProblem, limits: Limits | None = None, on_progress: OnProgress = silent
) -> LatencyResult:
    """The best placement found within ``limits``; optimal if it is proved to be."""
    return _Best(problem, limits or Limits(), on_progress).run()


class _Best:
    """The best placement, the best bound, and the clock."""

    def __init__(self, problem: LatencyProblem, limits: Limits, on_progress: OnProgress) -> None:
        self.began, self.limits, self.on_progress = perf_counter(), limits, on_progress
        self.problem = problem
        self.home: Home | None = None
        self.cost, self.bound, self.proved_by = np.inf, 0.0, PATHS
        self.path: tuple[int, ...] = ()

    def run(self) -> LatencyResult:
        """See `place_for_latency`."""
        search = LatencySearch(self.problem, self.limits.seed, self._keep)
        search.divide_orders(self._over())
        for bound, path in PathBound(self.problem).of_heavy_paths():
            if bound > self.bound:
                self.bound, self.path = bound, path
            if self._over(SHARE)():
                break
        search.anneal(self._over(SHARE))
        if self.bound == np.inf:
            return self._result(Status.INFEASIBLE)
        if self._over()():
            return self._result(self.limits.status(found=self.home is not None))
        return self._result(self._prove(search.by_node()))

    def _prove(self, positions: list[int] | None) -> Status:
        """Prove the placement optimal, or improve it, by CP-SAT in the remaining time."""
        model = LatencyModel(self.problem, positions, self.cost, self.bound, self.path)
        limits = replace(self.limits, seconds=self.limits.left(perf_counter() - self.began))
        answer = run_model(
            model.model, model.columns, cp_model.CpSolver(), limits, self._report, perf_counter()
        )
        if answer.status is Status.INFEASIBLE:
            self.bound, self.proved_by = np.inf, PROGRAM
            return Status.INFEASIBLE
        if answer.values is not None:
            self._keep(model.home(answer.values))
        if answer.bound * model.unit > self.bound:
            self.bound, self.proved_by = answer.bound * model.unit, PROGRAM
        if answer.status is Status.OPTIMAL and self._is_within(model.rounding):
            return Status.OPTIMAL
        return self.limits.status(found=self.home is not None)

    def _keep(self, home: Home) -> None:
        """Remember the placement if it is better."""
        try:
            cost = self.problem.evaluate(home)
        except InvalidPlan:  # by a rounding of bytes in CP-SAT
            return
        if cost < self.cost:
            self.home, self.cost = home, cost
            self._report(Progress(perf_counter(), cost, 0.0))

    def _report(self, _: Progress) -> None:
        """Report the best placement; CP-SAT's placements count only after they are evaluated."""
        seconds = perf_counter() - self.began
        cost = None if self.home is None else self.cost
        self.on_progress(Progress(seconds, cost, min(self.bound, self.cost)))

    def _over(self, share: float = 1.0) -> Callable[[], bool]:
        """Whether a share of the time is over, or the gap is as small as asked."""

        def over() -> bool:
            elapsed = perf_counter() - self.began
            late = elapsed >= share * self.limits.seconds or self.limits.left(elapsed) == 0
            return late or self._is_within(max(self.limits.gap, LEAST))

        return over

    def _is_within(self, gap: float) -> bool:
        return self.home is not None and self.cost - self.bound <= gap * self.cost

    def _result(self, status: Status) -> LatencyResult:
        cost = None if self.home is None else self.cost
        return LatencyResult(
            home=self.home,
            cost=cost,
            bound=min(self.bound, self.cost),
            proved_by=self.proved_by,
            status=settled(status, cost, self.bound, LEAST),
            seconds=perf_counter() - self.began,
        )
