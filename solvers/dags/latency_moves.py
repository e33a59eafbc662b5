"""Annealing of placements; compiled. Positions are those of ``latency_kernel``."""

import numpy as np
from numba import njit

from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.dags.latency_kernel import Nodes, latency

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
