"""Placements of low latency: divided topological orders, and annealing from the best order."""

from collections.abc import Callable, Sequence

import networkx as nx
import numpy as np
from numba import njit

from stagewright.formulations.dags.latency import HOST, Home, LatencyProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.solvers.dags.latency_kernel import Nodes, divide_order, latency

LEAST = 1e-12  # relative improvement that is not rounding
_GAPS = 0.02  # of the moves: an accelerator without nodes gets another place in the order
_ALONG = 0.7  # of the other moves: a node goes to the place of a neighbour in the graph


@njit(cache=True)
def anneal(  # noqa: C901 - one loop over moves
    nodes: Nodes,
    position: Ints,
    accelerators: int,
    moves: int,
    warmth: float,
    random: np.random.Generator,
) -> Ints:
    """The best positions of a walk from ``position``, which becomes its end.

    A step that costs ``warmth`` seconds more is taken with probability 1 / e.
    """
    n = len(position)
    stack, was = np.empty(n, np.int64), np.empty(n, np.int64)
    held = _held(nodes, position, accelerators)
    cost = latency(nodes, position, accelerators)
    best, best_position = cost, position.copy()
    for _ in range(moves):
        if random.random() < _GAPS:
            _move_gap(position, accelerators, random)
            held = _held(nodes, position, accelerators)
            continue
        v = int(random.integers(0, n))
        target = _target(nodes, position, v, accelerators, random)
        if target == position[v] or (target % 2 == 0 and not nodes.hosts):
            continue
        count = _pull(nodes, position, v, target, stack, was)
        change = np.inf
        if _fits(nodes, target, held, stack[:count]):
            change = latency(nodes, position, accelerators) - cost
        if change <= 0 or random.random() < np.exp(-change / warmth):
            for i in range(count):
                held[target] += nodes.held[stack[i]]
                held[was[i]] -= nodes.held[stack[i]]
            cost += change
            if cost < best * (1 - LEAST):
                best, best_position = cost, position.copy()
        else:
            for i in range(count):
                position[stack[i]] = was[i]
    return best_position


@njit(cache=True)
def _held(nodes: Nodes, position: Ints, accelerators: int) -> Floats:
    """The bytes at every position."""
    held = np.zeros(2 * accelerators + 1)
    for v in range(len(position)):
        held[position[v]] += nodes.held[v]
    return held


@njit(cache=True)
def _target(
    nodes: Nodes, position: Ints, v: int, accelerators: int, random: np.random.Generator
) -> int:
    """The target of a move of node v: a neighbour's position, or a position or two away."""
    makers, readers = nodes.made[v + 1] - nodes.made[v], nodes.read[v + 1] - nodes.read[v]
    if makers + readers > 0 and random.random() < _ALONG:
        i = random.integers(0, makers + readers)
        if i < makers:
            return int(position[nodes.maker[nodes.made[v] + i]])
        return int(position[nodes.reader[nodes.read[v] + i - makers]])
    step = random.integers(1, 3) if random.random() < 1 / 2 else -random.integers(1, 3)
    return int(min(max(position[v] + step, 0), 2 * accelerators))


@njit(cache=True)
def _pull(nodes: Nodes, position: Ints, v: int, target: int, stack: Ints, was: Ints) -> int:
    """Move node v to ``target`` with its group, and with all that would be on its wrong side.

    Returns how many nodes moved: the first of ``stack``, whose old positions are in ``was``.
    """
    count, done = 1, 0
    stack[0], was[0] = v, position[v]
    position[v] = target
    call = target % 2 == 1
    while done < count:
        u = stack[done]
        done += 1
        for i in range(nodes.of[u], nodes.of[u + 1]):
            w = nodes.mate[i]
            if position[w] != target and (call or position[w] % 2 == 1):
                stack[count], was[count], position[w] = w, position[w], target
                count += 1
        for i in range(nodes.made[u], nodes.made[u + 1]):
            w = nodes.maker[i]
            if position[w] > target:
                stack[count], was[count], position[w] = w, position[w], target
                count += 1
        for i in range(nodes.read[u], nodes.read[u + 1]):
            w = nodes.reader[i]
            if position[w] < target:
                stack[count], was[count], position[w] = w, position[w], target
                count += 1
    return count


@njit(cache=True)
def _fits(nodes: Nodes, target: int, held: Floats, moved: Ints) -> bool:
    """Whether the nodes ``moved`` to ``target`` run there, with the bytes ``held`` before."""
    if target % 2 == 0:
        return True
    more = held[target]
    for v in moved:
        if not nodes.supported[v]:
            return False
        more += nodes.held[v]
    return bool(more <= nodes.memory)


@njit(cache=True)
def _move_gap(position: Ints, accelerators: int, random: np.random.Generator) -> None:
    """Give an accelerator without nodes another place in the order, if a random one is such."""
    empty, to = random.integers(0, accelerators), random.integers(0, accelerators)
    if (position == 2 * empty + 1).any():
        return
    for v in range(len(position)):
        p = position[v]
        if 2 * to < p < 2 * empty + 1:
            position[v] = p + 2
        elif 2 * empty + 1 < p <= 2 * to + 1:
            position[v] = p - 2


_ORDERS = 32
ROUNDS, MOVES = 48, 20_000
CYCLE = 8  # rounds before annealing begins again from the best placement
WARM, COLD = 3e-2, 3e-4  # of the latency: what a step may cost, at first and at last
_BRANCHES = 2 / 3  # of the orders follow a branch to its end, the others go by levels


class LatencySearch:
    """The best placement so far, as ``positions`` (see the kernel) of nodes in a topological order.

    Every better one is given to ``found``; ``over`` ends a search.
    """

    def __init__(self, problem: LatencyProblem, seed: int, found: Callable[[Home], None]) -> None:
        self.problem, self.found = problem, found
        self.random = np.random.default_rng(seed)
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(len(problem.names)))
        graph.add_edges_from(problem.edges)
        self.blocks = _inseparable(problem, graph)
        self.order = list(nx.lexicographical_topological_sort(graph))
        self.nodes = _nodes(problem, self.order)
        self.cost = np.inf
        self.positions: Ints | None = None

    def divide_orders(self, over: Callable[[], bool]) -> None:
        """Begin with all on hosts, if there are hosts, and with random orders, divided."""
        if self.problem.hosts:
            self._keep(np.zeros(len(self.order), dtype=np.int64))
        for _ in range(_ORDERS):
            if over():
                return
            order, closed = self._random_order()
            cost, positions = divide_order(self.nodes, order, closed, self.problem.accelerators)
            if np.isfinite(cost):
                self._keep(positions)

    def anneal(self, over: Callable[[], bool]) -> None:
        """Improve the best placement, if there is one."""
        accelerators = self.problem.accelerators
        if self.positions is None or not accelerators:
            return
        current = self.positions.copy()
        for i in range(ROUNDS):
            if over():
                return
            if i % CYCLE == 0:
                current = self.positions.copy()
            warmth = self.cost * WARM * (COLD / WARM) ** (i / ROUNDS)
            self._keep(anneal(self.nodes, current, accelerators, MOVES, warmth or 1.0, self.random))

    def by_node(self) -> list[int] | None:
        """The positions of the nodes as the problem numbers them."""
        if self.positions is None:
            return None
        place = dict(zip(self.order, self.positions.tolist(), strict=True))
        return [place[v] for v in range(len(place))]

    def _keep(self, positions: Ints) -> None:
        cost = float(latency(self.nodes, positions, self.problem.accelerators))
        if cost < self.cost:
            self.cost, self.positions = cost, positions.copy()
            self.found(tuple(p // 2 if p % 2 else HOST for p in self.by_node() or ()))

    def _random_order(self) -> tuple[Ints, Bools]:
        """A topological order of the blocks, and where it may be cut."""
        rank = self.random.permutation(len(self.blocks)).tolist()
        if self.random.random() < _BRANCHES:
            back: nx.DiGraph[int] = nx.DiGraph()
            back.add_nodes_from(sorted(self.blocks, key=rank.__getitem__))
            edges = sorted(self.blocks.edges, key=lambda edge: rank[edge[0]])
            back.add_edges_from((b, a) for a, b in edges)
            chosen = list(nx.dfs_postorder_nodes(back))
        else:
            chosen = list(nx.lexicographical_topological_sort(self.blocks, key=rank.__getitem__))
        place = {v: i for i, v in enumerate(self.order)}
        order: list[int] = []
        closed: list[bool] = []
        for block in chosen:
            members = sorted(place[v] for v in self.blocks.nodes[block]["members"])
            order += members
            closed += [True] + [False] * (len(members) - 1)
        return np.array(order), np.array(closed)


def _inseparable(problem: LatencyProblem, graph: "nx.DiGraph[int]") -> "nx.DiGraph[int]":
    """Blocks of nodes that stay together: groups, with all nodes between theirs; acyclic."""
    together = graph.copy()
    for group in problem.groups:
        nx.add_cycle(together, group)
    return nx.condensation(together)


def _nodes(problem: LatencyProblem, order: list[int]) -> Nodes:
    """The nodes in the ``order``."""
    place = {v: i for i, v in enumerate(order)}
    readers: list[list[int]] = [[] for _ in order]
    makers: list[list[int]] = [[] for _ in order]
    for a, b in sorted(set(problem.edges)):
        readers[place[a]].append(place[b])
        makers[place[b]].append(place[a])
    mates = [[i] for i in range(len(order))]
    for group in problem.groups:
        for v in group:
            mates[place[v]] = [place[w] for w in group]
    return Nodes(
        problem.on_accelerator[order],
        problem.on_host[order],
        problem.transfer[order],
        problem.bytes[order],
        problem.supported[order],
        *_rows(readers),
        *_rows(makers),
        *_rows(mates),
        problem.memory * (1 + RELATIVE_TOLERANCE),
        problem.hosts,
    )


def _rows(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Lists as the beginnings of rows and their values."""
    begins = np.cumsum([0, *map(len, lists)])
    return begins, np.array([value for row in lists for value in row], dtype=np.int64)
