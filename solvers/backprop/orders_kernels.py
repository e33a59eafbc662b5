"""Compiled orders of operations on their resources: times, a longest path, moves.

Every resource runs its operations one after the other in a given order; an operation starts when
those before it, and its left neighbour on the resource, have ended.
"""

from typing import NamedTuple

import numpy as np

from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.compiled import inner

NONE = -1
SLACK = 1e-9  # relative to the end: on a longest path


class Graph(NamedTuple):
    """Operations with their predecessors (rows of ``before``) and successors (``after``)."""

    seconds: Floats
    resource: Ints
    first_in: Ints
    before: Ints
    first_out: Ints
    after: Ints


class Orders(NamedTuple):
    """The order on each resource, as neighbours of operations, and the times that follow.

    ``ready`` is the end of what precedes an operation, ``head`` its start; ``rest`` and ``tail``
    are the same from the end of the window. ``order`` and ``waits`` are for sorting.
    """

    left: Ints
    right: Ints
    ready: Floats
    head: Floats
    rest: Floats
    tail: Floats
    order: Ints
    waits: Ints


@inner
def place(graph: Graph, orders: Orders, order: Ints, places: int) -> None:
    """Put the operations on their resources, each in the sequence of ``order``."""
    last = np.full(places, NONE)
    orders.left[:] = NONE
    orders.right[:] = NONE
    for i in order:
        if graph.seconds[i] > 0.0:
            r = graph.resource[i]
            j = last[r]
            orders.left[i] = j
            if j != NONE:
                orders.right[j] = i
            last[r] = i


@inner
def time(graph: Graph, orders: Orders) -> float:  # noqa: C901 - one pass over operations
    """Compute all times; the end of the window, infinite if the orders have a cycle."""
    seconds, left, right = graph.seconds, orders.left, orders.right
    ready, head, order, waits = orders.ready, orders.head, orders.order, orders.waits
    size, at, end = 0, 0, 0.0
    for i in range(len(seconds)):
        waits[i] = graph.first_in[i + 1] - graph.first_in[i] + (left[i] != NONE)
        ready[i] = 0.0
        if waits[i] == 0:
            order[size] = i
            size += 1
    while at < size:
        i = order[at]
        at += 1
        head[i] = ready[i]
        if left[i] != NONE:
            head[i] = max(head[i], head[left[i]] + seconds[left[i]])
        finish = head[i] + seconds[i]
        end = max(end, finish)
        for e in range(graph.first_out[i], graph.first_out[i + 1]):
            j = graph.after[e]
            ready[j] = max(ready[j], finish)
            waits[j] -= 1
            if waits[j] == 0:
                order[size] = j
                size += 1
        j = right[i]
        if j != NONE:
            waits[j] -= 1
            if waits[j] == 0:
                order[size] = j
                size += 1
    if size < len(seconds):
        return np.inf
    _time_tails(graph, orders)
    return end


@inner
def _time_tails(graph: Graph, orders: Orders) -> None:
    seconds, right, rest, tail = graph.seconds, orders.right, orders.rest, orders.tail
    rest[:] = 0.0
    for at in range(len(seconds) - 1, -1, -1):
        i = orders.order[at]
        tail[i] = rest[i]
        if right[i] != NONE:
            tail[i] = max(tail[i], tail[right[i]] + seconds[right[i]])
        late = tail[i] + seconds[i]
        for e in range(graph.first_in[i], graph.first_in[i + 1]):
            j = graph.before[e]
            rest[j] = max(rest[j], late)


@inner
def longest_path(  # noqa: C901 - one walk
    graph: Graph, orders: Orders, end: float, path: Ints, begins: Ints, random: np.random.Generator
) -> int:
    """Write a longest path, chosen at random, and return its length.

    ``begins`` is 0 for the right neighbour of the one before: the two are in one block.
    """
    seconds, head, tail = graph.seconds, orders.head, orders.tail
    slack = SLACK * end
    size, seen, i, is_first = 0, 0, NONE, 1
    for j in range(len(seconds)):
        if head[j] <= slack and seconds[j] > 0.0 and seconds[j] + tail[j] >= end - slack:
            seen += 1
            if random.integers(0, seen) == 0:
                i = j
    while i != NONE:
        if seconds[i] > 0.0:
            path[size], begins[size] = i, is_first
            size += 1
        finish, seen, follower, is_first = head[i] + seconds[i] + slack, 0, NONE, 1
        for e in range(graph.first_out[i], graph.first_out[i + 1]):
            j = graph.after[e]
            if head[j] <= finish and head[j] + seconds[j] + tail[j] >= end - slack:
                seen += 1
                if random.integers(0, seen) == 0:
                    follower = j
        j = orders.right[i]
        is_next = j != NONE and head[j] <= finish
        if is_next and head[j] + seconds[j] + tail[j] >= end - slack:
            if follower != NONE and follower != j and random.integers(0, 2) == 0:
                i = follower
                continue
            follower, is_first = j, 0
        i = follower
    return size


@inner
def may_follow(graph: Graph, orders: Orders, i: int, j: int) -> bool:
    """Whether nothing after ``i`` is known to precede ``j``, by the times."""
    seconds, head, tail = graph.seconds, orders.head, orders.tail
    for e in range(graph.first_out[i], graph.first_out[i + 1]):
        s = graph.after[e]
        if s == j or (
            head[j] >= head[s] + seconds[s] and tail[j] + seconds[j] <= tail[s] + seconds[s]
        ):
            return False
    return True


@inner
def may_precede(graph: Graph, orders: Orders, i: int, j: int) -> bool:
    """Whether nothing before ``i`` is known to follow ``j``, by the times."""
    seconds, head, tail = graph.seconds, orders.head, orders.tail
    for e in range(graph.first_in[i], graph.first_in[i + 1]):
        s = graph.before[e]
        if s == j or (
            tail[j] >= tail[s] + seconds[s] and head[j] + seconds[j] <= head[s] + seconds[s]
        ):
            return False
    return True


@inner
def estimate(graph: Graph, orders: Orders, i: int, j: int, later: bool, chain: Ints) -> float:
    """About the longest path through ``i`` and all up to ``j``, with i right after or before j.

    The times of what is around them are taken as they are (Balas and Vazacopoulos 1998).
    """
    seconds, right = graph.seconds, orders.right
    size, k = 0, i if later else j
    if later:
        k = right[i]
        outer_left, outer_right = orders.left[i], right[j]
    else:
        chain[0], size = i, 1
        outer_left, outer_right = orders.left[j], right[i]
    last = j if later else orders.left[i]
    while True:
        chain[size] = k
        size += 1
        if k == last:
            break
        k = right[k]
    if later:
        chain[size] = i
        size += 1
    now = 0.0 if outer_left == NONE else orders.head[outer_left] + seconds[outer_left]
    heads = np.empty(size)
    for p in range(size):
        k = chain[p]
        heads[p] = max(now, orders.ready[k])
        now = heads[p] + seconds[k]
    late = 0.0 if outer_right == NONE else orders.tail[outer_right] + seconds[outer_right]
    most = 0.0
    for p in range(size - 1, -1, -1):
        k = chain[p]
        late = max(late, orders.rest[k])
        most = max(most, heads[p] + seconds[k] + late)
        late += seconds[k]
    return most


@inner
def move(orders: Orders, i: int, j: int, later: bool) -> None:
    """Move operation ``i`` right after, or right before, operation ``j`` of its resource."""
    left, right = orders.left, orders.right
    a, b = left[i], right[i]
    if a != NONE:
        right[a] = b
    if b != NONE:
        left[b] = a
    a, b = (j, right[j]) if later else (left[j], j)
    left[i], right[i] = a, b
    if a != NONE:
        right[a] = i
    if b != NONE:
        left[b] = i


@inner
def is_within(orders: Orders, k: int, first: int, last: int) -> bool:
    """Whether operation ``k`` is one of two operations of a resource, or between the two."""
    i = first
    while i != NONE:
        if i == k:
            return True
        if i == last:
            return False
        i = orders.right[i]
    return False
