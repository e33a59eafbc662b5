"""The partition with the least sum of the largest forward load and the largest backward load.

So long takes a sample in a pipeline that does all forwards before the first backward (Tarnawski et
al. 2020, appendix C). Of two loads, the program over downsets minimises one within a limit on the
other. The limit begins at infinity. Backward loads only grow as it falls, so the next limit that
can lead to a better sum is the best sum less the backward load found last.
"""

from time import perf_counter

import numpy as np

from stagewright.formulations.dags.problem import DagProblem, PlacedSet, heaviest_part, priced_load
from stagewright.formulations.forms.answers import (
    Limits,
    OnProgress,
    Progress,
    Status,
    settled,
    silent,
)
from stagewright.solvers.dags.merging import Downsets, downsets, expand, merge, prefixes
from stagewright.solvers.dags.partition import (
    DOWNSETS,
    MOST_DOWNSETS,
    DagResult,
    partition,
    topological_orders,
)
from stagewright.solvers.dags.program import LEAST, DownsetProgram
from stagewright.solvers.operators.ranks import best_prices

LOADS = "loads of both passes"

_Found = list[tuple[tuple[PlacedSet, ...], float]]


def partition_phases(
    problem: DagProblem, limits: Limits | None = None, on_progress: OnProgress = silent
) -> DagResult:
    """The optimum by dynamic programs over downsets; else the best found within ``limits``.

    ``cost`` is that of `DagProblem.evaluate_phases`. With more than ``MOST_DOWNSETS`` downsets only
    the prefixes of a few topological orders are divided.
    """
    if not _has_backward(problem):
        return partition(problem, limits, on_progress)
    return _PhaseSearch(problem, limits or Limits(), on_progress).run()


def _has_backward(problem: DagProblem) -> bool:
    back = problem.of_backward
    exchanges = problem.most_replicas > 1 and back.exchange is not None
    return bool(back.seconds.any() or back.tensors or exchanges)


class _PhaseSearch:
    """The two passes after merging, the best partition so far, and the clock."""

    def __init__(self, problem: DagProblem, limits: Limits, on_progress: OnProgress) -> None:
        self.began, self.limits, self.on_progress = perf_counter(), limits, on_progress
        self.whole, (self.problem, self.members) = problem, merge(problem)
        self.forth, self.back = self.problem.of_forward, self.problem.of_backward
        counts = np.array([pool.count for pool in problem.pools], dtype=float)
        self.prices = best_prices(self.back.seconds, counts)
        self.least_forth = _least_load(self.forth, counts)
        self.least_back = _least_load(self.back, counts)
        self.cost, self.pairs = np.inf, 0
        self.sets: tuple[PlacedSet, ...] | None = None

    def run(self) -> DagResult:
        orders = list(topological_orders(self.problem))
        for order in orders:
            self._sweep(prefixes(order), order)
        lattice = downsets(len(self.problem.names), self.problem.edges, MOST_DOWNSETS)
        if lattice is None or not self._sweep(lattice, orders[0]):
            return self._result(self.limits.status(found=self.sets is not None), lattice)
        return self._result(Status.INFEASIBLE if self.sets is None else Status.OPTIMAL, lattice)

    def _sweep(self, lattice: Downsets, order: list[int]) -> bool:
        """Look for better partitions into differences of downsets; False if stopped early."""
        most_forth = (self.cost - self.least_back) * (1 - LEAST)
        while most_forth >= self.least_forth * (1 - LEAST):
            found: _Found = []
            program = DownsetProgram(self.back, self.prices, self.forth, most_forth)
            most_back = self.cost - self.least_forth

            def keep(sets: tuple[PlacedSet, ...], cost: float, to: _Found = found) -> None:
                to.append((sets, cost))

            done = program.improve(lattice, order, most_back, keep, self._over)
            self.pairs += program.pairs
            if found:
                self._keep(found[-1][0])
            if not done:
                return False
            if not found:
                return True
            most_forth = (self.cost - found[-1][1]) * (1 - LEAST)
        return True

    def _keep(self, sets: tuple[PlacedSet, ...]) -> None:
        cost = self.problem.evaluate_phases(sets)
        if cost < self.cost:
            self.sets, self.cost = sets, cost
            bound = min(self.least_forth + self.least_back, cost)
            self.on_progress(Progress(perf_counter() - self.began, cost, bound))

    def _over(self) -> bool:
        return self.limits.left(perf_counter() - self.began) == 0

    def _result(self, status: Status, lattice: Downsets | None) -> DagResult:
        sets = None if self.sets is None else expand(self.sets, self.members)
        cost = None if sets is None else self.whole.evaluate_phases(sets)
        bound, proved_by = self.least_forth + self.least_back, LOADS
        if status is Status.OPTIMAL and cost is not None:
            bound, proved_by = cost, DOWNSETS
        status = settled(status, cost, bound, LEAST)
        return DagResult(
            sets=sets,
            cost=cost,
            bound=bound if cost is None else min(bound, cost),
            proved_by=proved_by,
            status=status,
            downsets=None if lattice is None else len(lattice),
            pairs=self.pairs,
            seconds=perf_counter() - self.began,
        )


def _least_load(problem: DagProblem, counts: np.ndarray) -> float:
    prices = best_prices(problem.seconds, counts)
    return max(priced_load(problem, prices), heaviest_part(problem))
