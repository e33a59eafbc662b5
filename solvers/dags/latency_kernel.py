"""The latency of a placement, and the division of an order into calls; compiled.

A placement is a position of every node, 0 to 2k: 2d + 1 is accelerator d, and 2d the hosts between
accelerators d - 1 and d. Positions never fall along an edge, so sets are contiguous and no
accelerators wait in a circle; every placement has such positions, by a topological order of its
calls.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from stagewright.graphs.documents.arrays import Bools, Floats, Ints


class Nodes(NamedTuple):
    """Nodes numbered in a topological order, with readers, makers and groups in CSR form.

    The readers of v are ``reader[read[v]:read[v + 1]]``, its makers and the nodes of its group in
    the same way (at least v itself).
    """

    accelerator: Floats
    host: Floats
    transfer: Floats
    held: Floats
    supported: Bools
    read: Ints
    reader: Ints
    made: Ints
    maker: Ints
    of: Ints
    mate: Ints
    memory: float
    hosts: bool


@njit(cache=True)
def latency(nodes: Nodes, position: Ints, accelerators: int) -> float:  # noqa: C901 - one pass over positions
    """Seconds until the last node is done."""
    n, places = len(position), 2 * accelerators + 1
    first = np.zeros(places + 1, np.int64)
    for v in range(n):
        first[position[v] + 1] += 1
    for p in range(places):
        first[p + 1] += first[p]
    order = np.empty(n, np.int64)
    free = first.copy()
    for v in range(n):
        order[free[position[v]]] = v
        free[position[v]] += 1
    done, paid = np.zeros(n), np.full(n, -1)
    last = 0.0
    for p in range(places):
        if p % 2 == 0:
            for v in order[first[p] : first[p + 1]]:
                start = 0.0
                for u in nodes.maker[nodes.made[v] : nodes.made[v + 1]]:
                    start = max(start, done[u])
                done[v] = start + nodes.host[v]
                last = max(last, done[v])
            continue
        start, took = 0.0, 0.0
        for v in order[first[p] : first[p + 1]]:
            took += nodes.accelerator[v]
            for u in nodes.maker[nodes.made[v] : nodes.made[v + 1]]:
                if position[u] != p and paid[u] != p:
                    paid[u] = p
                    took += nodes.transfer[u]
                    start = max(start, done[u])
            for w in nodes.reader[nodes.read[v] : nodes.read[v + 1]]:
                if position[w] != p:
                    took += nodes.transfer[v]
                    break
        for v in order[first[p] : first[p + 1]]:
            done[v] = start + took
        last = max(last, start + took)
    return last


@njit(cache=True)
def divide_order(nodes: Nodes, order: Ints, closed: Bools, accelerators: int) -> tuple[float, Ints]:  # noqa: C901 - one pass over segments
    """The best calls and host segments of an order that follow each other, and the positions.

    ``closed[i]``: whether the order may be cut before its i-th node. Infinity if there is none.
    """
    n = len(order)
    best = np.full((accelerators + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    origin = np.full((accelerators + 1, n + 1), -1)
    called = np.zeros((accelerators + 1, n + 1), np.bool_)
    place, path = np.empty(n, np.int64), np.zeros(n)
    for i in range(n):
        place[order[i]] = i
    for i in range(n):
        if not closed[i] or not np.isfinite(best[:, i]).any():
            continue
        fits, took, held, on_host = True, 0.0, 0.0, 0.0
        paid = np.zeros(n, np.bool_)
        left = np.zeros(n, np.int64)  # readers of a node of the segment that are not in it
        for j in range(i, n):
            v = order[j]
            held += nodes.held[v]
            fits = fits and held <= nodes.memory and nodes.supported[v]
            took += nodes.accelerator[v]
            left[v] = nodes.read[v + 1] - nodes.read[v]
            if left[v]:
                took += nodes.transfer[v]
            start = 0.0
            for u in nodes.maker[nodes.made[v] : nodes.made[v + 1]]:
                if place[u] >= i:
                    start = max(start, path[u])
                    left[u] -= 1
                    if left[u] == 0:
                        took -= nodes.transfer[u]
                elif not paid[u]:
                    paid[u] = True
                    took += nodes.transfer[u]
            path[v] = start + nodes.host[v]
            on_host = max(on_host, path[v])
            if not (fits or nodes.hosts):
                break
            if j + 1 < n and not closed[j + 1]:
                continue
            for d in range(accelerators + 1):
                if fits and d < accelerators and best[d, i] + took < best[d + 1, j + 1]:
                    best[d + 1, j + 1] = best[d, i] + took
                    origin[d + 1, j + 1] = i
                    called[d + 1, j + 1] = True
                if nodes.hosts and best[d, i] + on_host < best[d, j + 1]:
                    best[d, j + 1] = best[d, i] + on_host
                    origin[d, j + 1] = i
                    called[d, j + 1] = False
    d, j = int(np.argmin(best[:, n])), n
    cost = best[d, n]
    position = np.zeros(n, np.int64)
    while np.isfinite(cost) and j > 0:
        i = origin[d, j]
        for place_ in range(i, j):
            position[order[place_]] = 2 * d - 1 if called[d, j] else 2 * d
        d, j = (d - 1 if called[d, j] else d), i
    return cost, position
