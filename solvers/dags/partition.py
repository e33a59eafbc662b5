"""The partition of an operator graph with the least largest load, and a bound on it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from time import perf_counter

import networkx as nx
import numpy as np

from stagewright.formulations.dags.bounds import heaviest_part, priced_load
from stagewright.formulations.dags.problem import DagProblem, PlacedSet
from stagewright.formulations.forms.answers import Limits, OnProgress, Progress, Status, silent
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.solvers.dags.downsets import Contents, Downsets, downsets, prefixes
from stagewright.solvers.dags.kernel import Lattice, Machines, extend
from stagewright.solvers.dags.merging import expand, fits_together, merge
from stagewright.solvers.operators.bounds import best_prices

MOST_DOWNSETS = 400_000
LEAST = 1e-9  # relative improvement; less is rounding
CHUNK = 256  # downsets that are extended between two looks at the clock
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
    loads that are looked at; all downsets after that, if they can be listed. Where memory may bind,
    parts cannot be merged without loss, and there are many downsets: the optimum without memory
    limits is a bound, and the answer if it fits; the best of merged parts is a first partition.
    """
    search = partial(
        _Search, limits=limits or Limits(), on_progress=on_progress, began=perf_counter()
    )
    if fits_together(problem):
        return search(problem).run()
    roomy = tuple(replace(pool, memory=np.inf) for pool in problem.pools)
    free = search(replace(problem, pools=roomy)).run()
    if _fits(problem, free.sets):
        return free
    merged = search(problem, anyway=True, least=free).run()
    return search(problem, first=merged, least=free).run()


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
        """``anyway`` is that of ``merge``; the partition ``first`` and the bound ``least`` hold."""
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
        self.machines = _machines(self.problem, self.prices)

    def run(self) -> DagResult:
        orders = list(_orders(self.problem))
        for order in orders:
            self._solve(prefixes(order), order)
        lattice = downsets(len(self.problem.names), self.problem.edges, MOST_DOWNSETS)
        complete = lattice is not None and self._solve(lattice, orders[0])
        if complete:
            if self.sets is None:
                return self._result(Status.INFEASIBLE, lattice)
            self.bound, self.proved_by = self.cost, DOWNSETS
            return self._result(Status.OPTIMAL, lattice)
        return self._result(self.limits.status(found=self.sets is not None), lattice)

    def _result(self, status: Status, lattice: Downsets | None) -> DagResult:
        sets = None if self.sets is None else expand(self.sets, self.members)
        cost = None if sets is None else self.whole.evaluate(sets)
        return DagResult(
            sets=sets,
            cost=cost,
            bound=self.bound if cost is None else min(self.bound, cost),
            proved_by=self.proved_by,
            status=status,
            downsets=None if lattice is None else len(lattice),
            pairs=self.pairs,
            seconds=perf_counter() - self.began,
        )

    def _solve(self, lattice: Downsets, order: list[int]) -> bool:
        """Look for a better partition into differences of downsets; False if stopped early."""
        table = _lattice(self.problem, lattice, order, self.prices)
        n, states = len(lattice), len(self.machines.larger)
        best, came = np.full((states, n), np.inf), np.full((states, n), -1)
        best[0, 0] = 0.0
        for begin in range(0, n, CHUNK):
            if self.limits.left(perf_counter() - self.began) == 0:
                return False
            end = min(begin + CHUNK, n)
            known = self.cost * (1 - LEAST)
            pairs, most = extend(table, self.machines, begin, end, known, best, came)
            self.pairs += pairs
            if most < known:
                self.cost = most
                self.sets = tuple(self._sets(lattice, best, came))[::-1]
                seconds = perf_counter() - self.began
                self.on_progress(Progress(seconds, self.cost, min(self.bound, self.cost)))
        return True

    def _sets(self, lattice: Downsets, best: Floats, came: np.ndarray) -> Iterator[PlacedSet]:
        """The sets of the best partition of all parts, the last one first."""
        i = len(lattice) - 1
        state = int(np.argmin(best[:, i]))
        contents = Contents(lattice)
        while i:
            before = int(came[state, i])
            parts = tuple(sorted(contents.of(i) - contents.of(before)))
            pool, smaller = self._step(parts, state, best[state, i], best[:, before])
            yield PlacedSet(pool, parts)
            i, state = before, smaller

    def _step(
        self, parts: tuple[int, ...], state: int, cost: float, before: Floats
    ) -> tuple[int, int]:
        """The pool of the last set, and the state without its device."""
        for pool in range(len(self.problem.pools)):
            for smaller in np.flatnonzero(self.machines.larger[:, pool] == state).tolist():
                held = float(sum(self.problem.bytes[part] for part in parts))
                load = self.problem.load(parts, pool)
                fits = held <= self.machines.memory[pool]
                if fits and max(before[smaller], load) <= cost * (1 + RELATIVE_TOLERANCE):
                    return pool, smaller
        raise AssertionError("no set leads to this partition")


def _orders(problem: DagProblem) -> Iterator[list[int]]:
    """Topological orders: breadth first, and depth first from either end."""
    graph: nx.DiGraph[int] = nx.DiGraph(problem.edges)
    graph.add_nodes_from(range(len(problem.names)))
    yield list(nx.lexicographical_topological_sort(graph))
    yield _depth_first(graph)
    yield _depth_first(graph.reverse())[::-1]


def _depth_first(graph: "nx.DiGraph[int]") -> list[int]:
    """A topological order that follows a branch to its end before it begins the next."""
    return list(nx.dfs_postorder_nodes(graph.reverse()))


def _machines(problem: DagProblem, prices: Floats) -> Machines:
    counts = [pool.count for pool in problem.pools]
    states = list(product(*(range(count + 1) for count in counts)))
    number = {state: s for s, state in enumerate(states)}
    larger = np.full((len(states), len(counts)), -1)
    for s, state in enumerate(states):
        for k in range(len(counts)):
            more = (*state[:k], state[k] + 1, *state[k + 1 :])
            larger[s, k] = number.get(more, -1)
    left = (np.array(counts) - np.array(states)) @ prices
    return Machines(
        memory=np.array([pool.memory * (1 + RELATIVE_TOLERANCE) for pool in problem.pools]),
        pays=np.array([pool.pays_transfers for pool in problem.pools], dtype=np.int64),
        larger=larger,
        left=left * (1 + RELATIVE_TOLERANCE),
    )


def _lattice(problem: DagProblem, lattice: Downsets, order: list[int], prices: Floats) -> Lattice:
    n, pools = problem.seconds.shape
    rows = np.column_stack([problem.seconds, problem.bytes, (problem.seconds * prices).min(axis=1)])
    total = np.zeros((len(lattice), pools + 2))
    source = np.repeat(np.arange(len(lattice)), np.diff(lattice.first))
    # Downsets ascend by size, so that a sum is complete before another is made from it.
    first = np.unique(lattice.target, return_index=True)[1]
    for e in first.tolist():
        total[lattice.target[e]] = total[source[e]] + rows[lattice.node[e]]
    own: list[list[int]] = [[] for _ in range(n)]
    for t, one in enumerate(problem.tensors):
        for part in one.parts:
            own[part].append(t)
    return Lattice(
        first=lattice.first,
        node=lattice.node,
        target=lattice.target,
        rank=np.argsort(order),
        seconds=np.ascontiguousarray(total[:, :pools].T),
        held=np.ascontiguousarray(total[:, pools]),
        work=np.ascontiguousarray(total[:, pools + 1]),
        of=np.cumsum([0, *map(len, own)]),
        tensor=np.array([t for its in own for t in its], dtype=np.int64),
        cost=np.array([one.seconds for one in problem.tensors]),
        size=np.array([len(one.parts) for one in problem.tensors], dtype=np.int64),
    )
