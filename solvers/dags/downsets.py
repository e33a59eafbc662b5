"""The downsets of a directed acyclic graph: sets of nodes that have all their predecessors."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stagewright.graphs.documents.arrays import Ints


class Downsets(NamedTuple):
    """The lattice of downsets from the empty set to all nodes, in ascending order of size.

    ``node[first[i]:first[i + 1]]`` are the nodes that may be added to downset i, ascending, and
    ``target`` the numbers of the downsets that they lead to.
    """

    first: Ints
    node: Ints
    target: Ints

    def __len__(self) -> int:
        return len(self.first) - 1


def downsets(n: int, edges: Sequence[tuple[int, int]], most: int) -> Downsets | None:
    """All downsets of nodes 0 to n - 1; None if there are more than ``most``."""
    before, after = [0] * n, [0] * n
    for a, b in edges:
        before[b] |= 1 << a
        after[a] |= 1 << b
    ready = sum(1 << v for v in range(n) if not before[v])
    number, found = {0: 0}, [(0, ready)]
    first, node, target = [0], [], []
    for inside, ready in found:  # found grows
        rest = ready
        while rest:
            bit = rest & -rest
            rest ^= bit
            v = bit.bit_length() - 1
            larger = inside | bit
            if larger not in number:
                if len(found) == most:
                    return None
                number[larger] = len(found)
                found.append((larger, ready ^ bit | _freed(after[v], before, larger)))
            node.append(v)
            target.append(number[larger])
        first.append(len(node))
    columns = (np.array(column, dtype=np.int64) for column in (first, node, target))
    return Downsets(*columns)


def _freed(after: int, before: Sequence[int], inside: int) -> int:
    """The nodes of ``after`` whose predecessors are all ``inside``."""
    freed = 0
    while after:
        bit = after & -after
        after ^= bit
        if before[bit.bit_length() - 1] & ~inside == 0:
            freed |= bit
    return freed


def prefixes(order: Sequence[int]) -> Downsets:
    """The lattice of one order's prefixes."""
    n = len(order)
    first = np.minimum(np.arange(n + 2), n)
    return Downsets(first, np.array(order, dtype=np.int64), np.arange(1, n + 1))


class Contents:
    """The parts in each downset, found by going back one part at a time."""

    def __init__(self, lattice: Downsets) -> None:
        self.before = np.full(len(lattice), -1)
        self.part = np.full(len(lattice), -1)
        source = np.repeat(np.arange(len(lattice)), np.diff(lattice.first))
        self.before[lattice.target], self.part[lattice.target] = source, lattice.node

    def of(self, i: int) -> set[int]:
        """The parts of downset ``i``."""
        found = set()
        while i:
            found.add(int(self.part[i]))
            i = int(self.before[i])
        return found
