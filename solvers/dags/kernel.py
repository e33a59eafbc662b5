"""The dynamic program over pairs of downsets, compiled."""

from typing import NamedTuple

import numpy as np
from numba import njit

from stagewright.graphs.documents.arrays import Floats, Ints


class Lattice(NamedTuple):
    """Downsets and the sums over their parts (seconds, bytes).

    ``first``, ``node``, ``target`` are those of :class:`~downsets.Downsets`; ``rank`` of each part
    is its place in a topological order. ``seconds[k, i]`` are
    those of the parts of downset i on a device of pool k, ``held[i]`` their bytes, ``work[i]``
    their priced work and ``exchange[i]`` the seconds of sending their gradients. The tensors of
    part v are ``tensor[of[v]:of[v + 1]]``; ``cost`` and ``size`` of a tensor are its seconds and
    its number of parts. ``other`` and ``other_cost`` are the seconds of a second load, which is
    limited, as ``seconds`` and ``cost``.
    """

    first: Ints
    node: Ints
    target: Ints
    rank: Ints
    seconds: Floats
    held: Floats
    work: Floats
    exchange: Floats
    of: Ints
    tensor: Ints
    cost: Floats
    size: Ints
    other: Floats
    other_cost: Floats


class Machines(NamedTuple):
    """Pools k, and states s: how many devices of each pool have a set.

    ``larger[s, k, r]`` is the state with r + 1 more devices of pool k, -1 if there is none, for as
    many replicas as a set may have. ``left[s]``
    is the most priced work per second of load of the devices that are left.
    """

    memory: Floats
    pays: Ints
    larger: Ints
    left: Floats


@njit(cache=True, error_model="numpy")
def extend(  # noqa: C901 - one walk over the lattice
    a: Lattice,
    m: Machines,
    begin: int,
    end: int,
    most: float,
    most_other: float,
    best: Floats,
    came: Ints,
) -> tuple[int, float]:
    """Extend the partitions of downsets ``begin`` to ``end`` by one set each.

    ``best[s, i]`` is the least largest load of a partition of downset i with the devices of state
    s, and ``came[s, i]`` the downset before its last set. Partitions whose largest load is not
    below ``most`` are left out, which falls to the cost of every partition of all parts that is
    found; the number of pairs that were looked at, and ``most``, are returned. The second load of
    no set is above ``most_other``.

    A set is walked by adding parts by ascending rank, so that every larger downset is met once. The
    rank is a topological order, so that every set can be walked.
    """
    states, pools, replicas = m.larger.shape
    last = len(a.first) - 2
    whole = a.work[last]
    depths = len(a.rank) + 1
    inside = np.zeros(len(a.cost), dtype=np.int64)
    at = np.zeros(depths, dtype=np.int64)
    added = np.zeros(depths, dtype=np.int64)
    edge = np.zeros(depths, dtype=np.int64)
    sent, other = np.zeros(depths), np.zeros(depths)  # of the tensors that are cut
    pairs = 0
    for i in range(begin, end):
        open_ = False
        for s in range(states):
            if best[s, i] < most and whole - a.work[i] <= m.left[s] * most:
                open_ = True
        if not open_:
            continue
        depth, at[0], added[0], edge[0] = 0, i, -1, a.first[i]
        while depth >= 0:
            here = at[depth]
            if edge[depth] == a.first[here + 1]:
                v = added[depth]
                if v >= 0:
                    for q in range(a.of[v], a.of[v + 1]):
                        inside[a.tensor[q]] -= 1
                depth -= 1
                continue
            v, j = a.node[edge[depth]], a.target[edge[depth]]
            edge[depth] += 1
            if added[depth] >= 0 and a.rank[v] < a.rank[added[depth]]:
                continue
            fits = False
            for k in range(pools):
                light = (a.seconds[k, j] - a.seconds[k, i]) / replicas < most
                light &= (a.other[k, j] - a.other[k, i]) / replicas <= most_other
                fits |= light and a.held[j] - a.held[i] <= m.memory[k]
            if not fits:
                continue
            depth += 1
            sent[depth], other[depth] = sent[depth - 1], other[depth - 1]
            for q in range(a.of[v], a.of[v + 1]):
                t = a.tensor[q]
                if inside[t] > 0:
                    sent[depth] -= a.cost[t]
                    other[depth] -= a.other_cost[t]
                inside[t] += 1
                if inside[t] < a.size[t]:
                    sent[depth] += a.cost[t]
                    other[depth] += a.other_cost[t]
            at[depth], added[depth], edge[depth] = j, v, a.first[j]
            pairs += 1
            rest = whole - a.work[j]
            for k in range(pools):
                if a.held[j] - a.held[i] > m.memory[k]:
                    continue
                alone = a.seconds[k, j] - a.seconds[k, i] + (sent[depth] if m.pays[k] else 0.0)
                second = a.other[k, j] - a.other[k, i] + (other[depth] if m.pays[k] else 0.0)
                for r in range(replicas):
                    load = (alone + 2 * r * (a.exchange[j] - a.exchange[i])) / (r + 1)
                    if load >= most or second > most_other * (r + 1):
                        continue
                    for s in range(states):
                        larger = m.larger[s, k, r]
                        if larger < 0 or rest > m.left[larger] * most:
                            continue
                        cost = max(best[s, i], load)
                        if cost < best[larger, j] and cost < most:
                            best[larger, j] = cost
                            came[larger, j] = i
                            if j == last:
                                most = cost
    return pairs, most
