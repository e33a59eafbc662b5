"""Large-neighbourhood search: a partition solved again on fewer parts, some free, others in blocks.

Cut a topological order that runs through the sets one after the other into blocks, nowhere across a
set. Blocks in place of parts make a graph that is acyclic too, each of its contiguous partitions is
one of the parts with the same loads, and the present one is among them. Blocks of one part are the
neighbourhood: some sets next to each other; the rest is coarse, and often keeps its order. The
dynamic program over all downsets of the blocks finds the best.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np

from stagewright.formulations.dags.problem import DagProblem, PlacedSet
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.dags.downsets import Downsets, downsets
from stagewright.solvers.dags.merging import expand, merged
from stagewright.solvers.dags.program import Program

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
        program = Program(coarse, self.prices)

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
