"""The partition of an operator graph with the least largest load, and a bound on it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import networkx as nx
import numpy as np

from stagewright.formulations.dags.bounds import heaviest_part, priced_load
from stagewright.formulations.dags.problem import DagProblem, PlacedSet
from stagewright.formulations.forms.answers import (
    Limits,
    OnProgress,
    Progress,
    Status,
    settled,
    silent,
)
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.solvers.dags.downsets import Downsets, downsets, prefixes
from stagewright.solvers.dags.merging import expand, fits_together, merge
from stagewright.solvers.dags.neighbourhood import Neighbourhoods
from stagewright.solvers.dags.program import LEAST, Program
from stagewright.solvers.operators.bounds import best_prices

MOST_DOWNSETS = 400_000
DOWNSETS, LOAD, PART = "dynamic program over downsets", "load priced by device", "heaviest part"


@dataclass(frozen=True, slots=True, eq=False)
class DagResult:
    """The best partition found and a bound on the largest load of every contiguous one (seconds).

    An optimal one is so up to ``LEAST``. ``sets`` are in the order of the pipeline; None if nothing
    was found. ``downsets`` are those that were listed, None if there are more than
    ``MOST_DOWNSETS``; ``pairs`` the sets whose load was computed.
    """

    sets: tuple[PlacedSet, ...] | None
    cost: float | None
    bound: float
    proved_by: str
    status: Status
    downsets: int | None
    pairs: int
    seconds: float

    @property
    def gap(self) -> float | None:
        """(cost - bound) / cost."""
        if self.cost is None:
            return None
        return (self.cost - self.bound) / self.cost if self.cost > self.bound else 0.0


def partition(
    problem: DagProblem, limits: Limits | None = None, on_progress: OnProgress = silent
) -> DagResult:
    """The optimum by a dynamic program over downsets; else the best found within ``limits``.

    First the same program on the prefixes of a few topological orders, whose answer bounds the
    loads that are looked at; all downsets after that, if they can be listed, else neighbourhoods of
    the best partition. Where memory may bind,
    parts cannot be merged without loss, and there are many downsets: the optimum without memory
    limits is a bound, and the answer if it fits; the best of merged parts is a first partition.
    """
    search = partial(
        _Search, limits=limits or Limits(), on_progress=on_progress, began=perf_counter()
    )
    if fits_together(problem):
        return search(problem).run()
    roomy = tuple(replace(pool, memory=np.inf) for pool in problem.pools)
    free = search(replace(problem, pools=roomy)).run(share=0.0)
    fits = _fits(problem, free.sets)
    if fits and free.status is Status.OPTIMAL:
        return free
    merged = search(problem, anyway=True, least=free).run(share=1 / 2)
    known = [one for one in (merged, free if fits else None) if one and one.cost is not None]
    first = min(known, key=lambda one: one.cost or 0.0, default=None)
    return search(problem, first=first, least=free).run()


def _fits(problem: DagProblem, sets: tuple[PlacedSet, ...] | None) -> bool:
    if sets is None:
        return False
    try:
        problem.evaluate(sets)
    except InvalidPlan:
        return False
    return True


class _Search:
    """The parts after merging, the best partition so far, and the clock."""

    def __init__(
        self,
        problem: DagProblem,
        limits: Limits,
        on_progress: OnProgress,
        began: float,
        *,
        anyway: bool = False,
        first: "DagResult | None" = None,
        least: "DagResult | None" = None,
    ) -> None:
        """Start from a partition ``first`` and a bound ``least``; ``anyway`` goes to ``merge``."""
        self.began = began
        self.whole, self.limits, self.on_progress = problem, limits, on_progress
        self.problem, self.members = merge(problem, anyway=anyway)
        self.prices = best_prices(
            self.problem.seconds, np.array([pool.count for pool in problem.pools], dtype=float)
        )
        load, part = priced_load(problem, self.prices), heaviest_part(problem)
        self.bound, self.proved_by = max((load, LOAD), (part, PART))
        if least is not None and least.bound > self.bound:
            self.bound, self.proved_by = least.bound, f"{least.proved_by}, without memory limits"
        self.cost, self.pairs = np.inf, 0
        self.sets: tuple[PlacedSet, ...] | None = None
        if first is not None and first.sets is not None and first.cost is not None:
            self.sets, self.cost = first.sets, first.cost
        self.program = Program(self.problem, self.prices)

    def run(self, share: float = 1.0) -> DagResult:
        """Search; neighbourhoods, if needed, get a ``share`` of the remaining time."""
        orders = list(topological_orders(self.problem))
        for order in orders:
            self._solve(prefixes(order), order)
        lattice = downsets(len(self.problem.names), self.problem.edges, MOST_DOWNSETS)
        complete = lattice is not None and self._solve(lattice, orders[0])
        if complete:
            if self.sets is None:
                return self._result(Status.INFEASIBLE, lattice)
            self.bound, self.proved_by = self.cost, DOWNSETS
            return self._result(Status.OPTIMAL, lattice)
        if self.sets is not None:
            self._improve(self.sets, share)
        return self._result(self.limits.status(found=self.sets is not None), lattice)

    def _improve(self, sets: tuple[PlacedSet, ...], share: float) -> None:
        """Look into neighbourhoods of the partition ``sets``."""
        until = perf_counter() - self.began + share * self._left()
        near = Neighbourhoods(self.problem, self.prices, sets, self.cost, self.limits.seed)
        near.search(self._keep, lambda: self._over(until))
        self.pairs += near.pairs

    def _result(self, status: Status, lattice: Downsets | None) -> DagResult:
        sets = None if self.sets is None else expand(self.sets, self.members)
        cost = None if sets is None else self.whole.evaluate(sets)
        return DagResult(
            sets=sets,
            cost=cost,
            bound=self.bound if cost is None else min(self.bound, cost),
            proved_by=self.proved_by,
            status=settled(status, cost, self.bound, LEAST),
            downsets=None if lattice is None else len(lattice),
            pairs=self.pairs + self.program.pairs,
            seconds=perf_counter() - self.began,
        )

    def _solve(self, lattice: Downsets, order: list[int]) -> bool:
        """Look for a better partition into differences of downsets; False if stopped early."""
        return self.program.improve(lattice, order, self.cost, self._keep, self._over)

    def _keep(self, sets: tuple[PlacedSet, ...], cost: float) -> None:
        self.sets, self.cost = sets, cost
        seconds = perf_counter() - self.began
        self.on_progress(Progress(seconds, cost, min(self.bound, cost)))

    def _left(self) -> float:
        return self.limits.left(perf_counter() - self.began)

    def _over(self, until: float = np.inf) -> bool:
        """Whether it is time to end, or the best partition is proved to be as good as asked."""
        near = self._is_within(max(self.limits.gap, LEAST))
        return near or self._left() == 0 or perf_counter() - self.began >= until

    def _is_within(self, gap: float) -> bool:
        return self.sets is not None and self.cost - self.bound <= gap * self.cost


def topological_orders(problem: DagProblem) -> Iterator[list[int]]:
    """Topological orders: breadth first, and depth first from either end."""
    graph: nx.DiGraph[int] = nx.DiGraph(problem.edges)
    graph.add_nodes_from(range(len(problem.names)))
    yield list(nx.lexicographical_topological_sort(graph))
    yield _depth_first(graph)
    yield _depth_first(graph.reverse())[::-1]


def _depth_first(graph: "nx.DiGraph[int]") -> list[int]:
    """A topological order that follows a branch to its end before it begins the next."""
    return list(nx.dfs_postorder_nodes(graph.reverse()))
