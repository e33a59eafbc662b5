"""Lower bounds on the latency of every placement, from one path of the graph at a time.

The nodes of a path follow each other, and contiguous calls meet the path in segments. So the
latency is at least that of the best division of the path into nodes on hosts and at most k calls,
each of which takes at least

- the nodes of its segment, with all that contiguity and groups then force into the call;
- the outputs that it reads from nodes which contiguity keeps out of it, since they come before the
  path's node before the segment, and those that it makes for nodes that are kept out likewise;
- for each other output that it reads, the transfer or the node that makes it, and what that node
  reads in turn, as far as the memory that is left can hold them (a knapsack, in fractions);
- for each other output that it makes, the transfer or all nodes that read it, and theirs in turn.
"""

from collections.abc import Iterator, Sequence

import networkx as nx
import numpy as np

from stagewright.formulations.dags.latency import LatencyProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats

DEPTH = 16  # of branches whose nodes may join a call
_MOST_WEIGHTS = 24  # of nodes, by which paths are heavy


class PathBound:
    """Bounds from paths; see the module."""

    def __init__(self, problem: LatencyProblem) -> None:
        self.problem = problem
        n = len(problem.names)
        graph: nx.DiGraph[int] = nx.DiGraph(problem.edges)
        graph.add_nodes_from(range(n))
        order = list(nx.topological_sort(graph))
        # Sets of nodes are the bits of numbers.
        self.makers = [sum(1 << u for u in graph.predecessors(v)) for v in range(n)]
        self.readers = [sum(1 << w for w in graph.successors(v)) for v in range(n)]
        self.below, self.above = [0] * n, [0] * n  # with the node itself
        for v in order:
            self.above[v] = 1 << v
            for u in graph.predecessors(v):
                self.above[v] |= self.above[u]
        for v in reversed(order):
            self.below[v] = 1 << v
            for w in graph.successors(v):
                self.below[v] |= self.below[w]
        self.group = [1 << v for v in range(n)]
        for members in problem.groups:
            for v in members:
                self.group[v] = sum(1 << w for w in members)

    def of(self, path: Sequence[int]) -> float:
        """The least latency of a division of ``path``; infinite if it cannot be divided."""
        k, size = self.problem.accelerators, len(path)
        best = np.full((k + 1, size + 1), np.inf)
        best[0, 0] = 0.0
        for i, v in enumerate(path):
            if self.problem.hosts:
                on_host = best[:, i] + self.problem.on_host[v]
                best[:, i + 1] = np.minimum(best[:, i + 1], on_host)
            for j, seconds in self._calls(path, i):
                best[1:, j] = np.minimum(best[1:, j], best[:-1, i] + seconds)
        return float(best[:, size].min())

    def _calls(self, path: Sequence[int], i: int) -> Iterator[tuple[int, float]]:
        """(j, seconds) of a call that meets the path in nodes i to j - 1, for every j that fits."""
        problem = self.problem
        before = self.above[path[i - 1]] if i else 0
        room = problem.memory * (1 + RELATIVE_TOLERANCE)
        inside, below, above, read, open_, took = 0, 0, 0, 0, 0, 0.0
        for j in range(i, len(path)):
            wanted = self.group[path[j]] & ~inside
            while wanted:
                grouped = 0
                for v in _bits(wanted):
                    if not problem.supported[v]:
                        return
                    took += float(problem.on_accelerator[v])
                    room -= float(problem.bytes[v])
                    below, above = below | self.below[v], above | self.above[v]
                    grouped, read = grouped | self.group[v], read | self.makers[v]
                inside |= wanted
                open_ |= wanted
                wanted = (below & above | grouped) & ~inside
            if room < 0 or inside & before:
                return
            open_ = sum(1 << v for v in _bits(open_) if self.readers[v] & ~inside)
            after = self.below[path[j + 1]] if j + 1 < len(path) else 0
            if not inside & after:
                claimed = [inside | read]
                received = self._received(read & ~inside, before, claimed, room)
                given = sum(self._sent(v, after, claimed, DEPTH) for v in _bits(open_))
                yield j + 1, took + received + given

    def _received(self, read: int, before: int, claimed: list[int], room: float) -> float:
        """The least seconds for a call's inputs from nodes ``read``, each received or in the call.

        Nodes and transfers count once in a call: for the first node that claims them.
        """
        total, others = 0.0, []
        for u in _bits(read):
            sent = float(self.problem.transfer[u])
            total += sent
            held = sum(float(self.problem.bytes[w]) for w in _bits(self._joining(u, claimed)))
            saved = sent - self._made_inside(u, before, claimed, DEPTH)
            if saved > 0:
                others.append((saved, held))
        return total - _fractional_knapsack(others, room)

    def _joining(self, v: int, claimed: list[int]) -> int:
        """The unclaimed nodes of the group of node v, and v, as bits."""
        return 1 << v | self.group[v] & ~claimed[0]

    def _made_inside(self, u: int, before: int, claimed: list[int], depth: int) -> float:
        """The least seconds that node u's group adds to the call; infinite if not allowed.

        Each of their makers is received, or in the call too.
        """
        joining, makers, total = self._joining(u, claimed), 0, 0.0
        for v in _bits(joining):
            if before >> v & 1 or not self.problem.supported[v]:
                return np.inf
            total += float(self.problem.on_accelerator[v])
            makers |= self.makers[v]
        claimed[0] |= joining
        makers = makers & ~claimed[0] if depth else 0
        claimed[0] |= makers
        for w in _bits(makers):
            sent = float(self.problem.transfer[w])
            total += min(sent, self._made_inside(w, before, claimed, depth - 1))
        return total

    def _sent(self, v: int, after: int, claimed: list[int], depth: int) -> float:
        """The least seconds for node v's output: it is sent, or all its readers are in the call."""
        sent = float(self.problem.transfer[v])
        if self.readers[v] & after:
            return sent
        readers = self.readers[v] & ~claimed[0] if depth else 0
        claimed[0] |= readers
        total = 0.0
        for w in _bits(readers):
            joining = self._joining(w, claimed)
            claimed[0] |= joining
            if not all(self.problem.supported[v] for v in _bits(joining)):
                return sent
            total += sum(float(self.problem.on_accelerator[v]) for v in _bits(joining))
            total += self._sent(w, after, claimed, depth - 1)
        return min(sent, total)

    def of_heavy_paths(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """The bounds of some different heavy paths, with the paths."""
        seen = set()
        for weights in self._weights():
            path = tuple(_heaviest(self.problem, weights))
            if path not in seen:
                seen.add(path)
                yield self.of(path), path

    def _weights(self) -> Iterator[Floats]:
        """Weights of nodes for heavy paths: times, transfers, bytes, and mixtures of these."""
        problem = self.problem
        kinds = [
            values / max(float(values.sum()), 1e-300)
            for values in (problem.on_accelerator, problem.on_host, problem.transfer, problem.bytes)
        ]
        yield from kinds
        random = np.random.default_rng(0)
        for _ in range(_MOST_WEIGHTS - len(kinds)):
            shares = random.dirichlet(np.full(len(kinds), 0.5))
            yield sum(share * values for share, values in zip(shares, kinds, strict=True))


def _heaviest(problem: LatencyProblem, weights: Floats) -> list[int]:
    """The path with the largest sum of ``weights`` of its nodes."""
    graph: nx.DiGraph[int] = nx.DiGraph(problem.edges)
    graph.add_nodes_from(range(len(weights)))
    total: dict[int, float] = {}
    maker: dict[int, int] = {}
    for v in nx.topological_sort(graph):
        for u in graph.predecessors(v):
            if v not in maker or total[u] > total[maker[v]]:
                maker[v] = u
        total[v] = float(weights[v]) + (total[maker[v]] if v in maker else 0.0)
    path = [max(total, key=total.__getitem__)]
    while path[-1] in maker:
        path.append(maker[path[-1]])
    return path[::-1]


def _fractional_knapsack(items: list[tuple[float, float]], room: float) -> float:
    """The largest saving of items (saving, size), the last one in part, that have room."""
    saved = 0.0
    for saving, size in sorted(items, key=lambda one: -one[0] / max(one[1], 1e-300)):
        if size > room:
            return saved + saving * room / size
        saved, room = saved + saving, room - size
    return saved


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
