"""The partition of an operator graph with the least largest load, and a bound on it.

Large-neighbourhood search: a partition solved again on fewer parts, some free, others in blocks.

Cut a topological order that runs through the sets one after the other into blocks, nowhere across a
set. Blocks in place of parts make a graph that is acyclic too, each of its contiguous partitions is
one of the parts with the same loads, and the present one is among them. Blocks of one part are the
neighbourhood: some sets next to each other; the rest is coarse, and often keeps its order. The
dynamic program over all downsets of the blocks finds the best.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import networkx as nx
import numpy as np

from stagewright.formulations.dags.problem import DagProblem, PlacedSet, heaviest_part, priced_load
from stagewright.formulations.forms.answers import (
    Bounded,
    Limits,
    OnProgress,
    Progress,
    Status,
    settled,
    silent,
)
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.solvers.dags.merging import (
    Downsets,
    downsets,
    expand,
    fits_together,
    merge,
    merged,
    prefixes,
)
from stagewright.solvers.dags.program import LEAST, DownsetProgram
from stagewright.solvers.operators.ranks import best_prices

SIZES = (1_000, 4_000, 16_000)  # the most downsets of a round, as rounds find nothing
COARSE = 3  # blocks of a set that is not in the neighbourhood
WINDOW = 3  # sets that may be next to each other in a neighbourhood
STALE = 30  # rounds without a better partition, after which they grow, or the search ends

Blocks = list[list[int]]


@dataclass(slots=True)
class Neighbourhoods:
    """Rounds of the search from ``sets`` with the largest load ``cost``.

    ``seed`` makes the rounds reproducible; ``pairs`` counts the sets whose load was computed.
    """

    problem: DagProblem
    prices: Floats
    sets: tuple[PlacedSet, ...]
    cost: float
    seed: int
    pairs: int = 0

    def search(
        self, found: Callable[[tuple[PlacedSet, ...], float], None], over: Callable[[], bool]
    ) -> None:
        """Give every better partition to ``found``, until ``over`` or nothing better is found."""
        random, stale = np.random.default_rng(self.seed), 0
        graph: nx.DiGraph[int] = nx.DiGraph(self.problem.edges)
        graph.add_nodes_from(range(len(self.problem.names)))
        while stale < STALE * len(SIZES) and not over():
            before = self.cost
            self._round(graph, random, SIZES[stale // STALE], over)
            stale = 0 if self.cost < before else stale + 1
            if self.cost < before:
                found(self.sets, self.cost)

    def _round(
        self,
        graph: "nx.DiGraph[int]",
        random: np.random.Generator,
        most: int,
        over: Callable[[], bool],
    ) -> None:
        orders = [_random_order(graph.subgraph(one.parts), random) for one in self.sets]
        first, count = self._window(random)
        in_order = random.random() < 1 / 2
        free = range(first, first + count)
        blocks, coarse, lattice = self._blocks(orders, free, most, in_order=in_order)
        program = DownsetProgram(coarse, self.prices)

        def keep(sets: tuple[PlacedSet, ...], cost: float) -> None:
            self.sets, self.cost = expand(sets, tuple(map(tuple, blocks))), cost

        program.improve(lattice, list(range(len(blocks))), self.cost, keep, over)
        self.pairs += program.pairs

    def _window(self, random: np.random.Generator) -> tuple[int, int]:
        """The first of the sets to divide freely, and their number: often about the slowest."""
        count = int(random.integers(1, min(WINDOW, len(self.sets)) + 1))
        last = len(self.sets) - count
        if random.random() < 1 / 2:
            return int(random.integers(0, last + 1)), count
        loads = [self.problem.load(one.parts, one.pool, one.replicas) for one in self.sets]
        slowest = int(np.argmax(loads)) - int(random.integers(0, count))
        return min(max(0, slowest), last), count

    def _blocks(
        self, orders: Sequence[list[int]], free: range, most: int, *, in_order: bool
    ) -> tuple[Blocks, DagProblem, Downsets]:
        """Blocks as fine as the number of their downsets allows, with their problem.

        ``in_order``: all but the free blocks keep their order, which leaves few downsets.
        """
        size = 1
        while True:
            cuts = [
                _cut(order, size if s in free else -(-len(order) // COARSE))
                for s, order in enumerate(orders)
            ]
            blocks = [block for its in cuts for block in its]
            coarse = _in_blocks(self.problem, blocks)
            if in_order:
                begin = sum(map(len, cuts[: free.start]))
                end = begin + sum(map(len, cuts[free.start : free.stop]))
                coarse = _ordered(coarse, begin, end)
            lattice = downsets(len(blocks), coarse.edges, most)
            if lattice is not None:
                return blocks, coarse, lattice
            size, in_order = (2 * size if in_order else size), True


def _cut(order: list[int], size: int) -> Blocks:
    return [order[i : i + size] for i in range(0, len(order), size)]


def _in_blocks(problem: DagProblem, blocks: Blocks) -> DagProblem:
    place = {part: b for b, block in enumerate(blocks) for part in block}
    return merged(problem, [place[part] for part in range(len(place))], tuple(map(tuple, blocks)))


def _ordered(problem: DagProblem, begin: int, end: int) -> DagProblem:
    """The blocks of an order in which parts ``begin`` to ``end`` come between the others."""
    last = len(problem.names) - 1
    pairs = [(b, b + 1) for b in range(last) if b + 1 < begin or b >= end]
    pairs += [(begin - 1, b) for b in range(begin, end) if begin > 0]
    pairs += [(b, end) for b in range(begin, end) if end <= last]
    return replace(problem, edges=tuple({*problem.edges, *pairs}))


def _random_order(graph: "nx.DiGraph[int]", random: np.random.Generator) -> list[int]:
    """A topological order: one that follows branches to their ends, or one by levels."""
    rank = dict(zip(graph, random.permutation(len(graph)).tolist(), strict=True))
    if random.random() < 1 / 2:
        return list(nx.lexicographical_topological_sort(graph, key=rank.__getitem__))
    shuffled: nx.DiGraph[int] = nx.DiGraph()
    shuffled.add_nodes_from(sorted(graph, key=rank.__getitem__))
    shuffled.add_edges_from((b, a) for a, b in sorted(graph.edges, key=lambda e: rank[e[0]]))
    return list(nx.dfs_postorder_nodes(shuffled))


MOST_DOWNSETS = 400_000
DOWNSETS, LOAD, PART = "dynamic program over downsets", "load priced by device", "heaviest part"


@dataclass(frozen=True, slots=True, eq=False)
class DagResult(Bounded):
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
        _PartitionSearch, limits=limits or Limits(), on_progress=on_progress, began=perf_counter()
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


class _PartitionSearch:
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
        self.program = DownsetProgram(self.problem, self.prices)

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
