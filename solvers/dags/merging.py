"""Parts that an optimal partition has together, where memory does not bind."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from stagewright.formulations.dags.problem import DagProblem, PlacedSet
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


def merge(
    problem: DagProblem, *, anyway: bool = False
) -> tuple[DagProblem, tuple[tuple[int, ...], ...]]:
    """A problem of fewer parts with the same optimum, and the parts of ``problem`` in each.

    A part v that takes no time, and exchanges nothing, moves to the set of a part u if all tensors
    of v are also of u, so that no set pays for one more, and either u is the last of v's
    predecessors (all others have a path to it) or the first of its successors: the sets stay
    contiguous. Memory may change hands,
    so nothing is merged unless all parts fit together in the smallest memory; or ``anyway``, when
    the optimum may be worse, or there may be none.
    """
    place = list(range(len(problem.names)))
    if anyway or fits_together(problem):
        place = _Merging(problem).run()
    kept = sorted(set(place))
    number = {part: i for i, part in enumerate(kept)}
    members = tuple(tuple(i for i, part in enumerate(place) if part == one) for one in kept)
    return merged(problem, [number[part] for part in place], members), members


def fits_together(problem: DagProblem) -> bool:
    """Whether all parts fit in the smallest memory, so that memory forbids nothing."""
    smallest = min(pool.memory for pool in problem.pools if pool.count)
    return float(problem.bytes.sum()) <= smallest


class _Merging:
    """Parts and their neighbours while some of them are merged; sets of parts as bits."""

    def __init__(self, problem: DagProblem) -> None:
        n = len(problem.names)
        self.place = list(range(n))
        self.idle = {
            v
            for v in range(n)
            if not problem.seconds[v].any()
            and (problem.exchange is None or not problem.exchange[v])
        }
        self.after, self.before = ({v: set[int]() for v in range(n)} for _ in range(2))
        for a, b in problem.edges:
            self.after[a].add(b)
            self.before[b].add(a)
        self.tensors = [set(one.parts) for one in problem.tensors if one.seconds]

    def run(self) -> list[int]:
        """The part that each part ends up in."""
        while (move := self._move()) is not None:
            self._merge(*move)
        return self.place

    def _move(self) -> tuple[int, int] | None:
        """An idle part and the part that it may move to."""
        below = self._reached()
        for v in sorted(self.idle):
            its = [parts for parts in self.tensors if v in parts]
            near = self.before[v] | self.after[v]
            for u in sorted(near.intersection(*its)):
                others = (self.before[v] if u in self.before[v] else self.after[v]) - {u}
                if u in self.before[v] and all(below[w] >> u & 1 for w in others):
                    return v, u
                if u in self.after[v] and all(below[u] >> w & 1 for w in others):
                    return v, u
        return None

    def _reached(self) -> dict[int, int]:
        """For every part, the parts that a path from it reaches."""
        waiting = {v: len(its) for v, its in self.after.items()}
        ready = [v for v, count in waiting.items() if not count]
        below: dict[int, int] = {}
        for v in ready:  # grows
            found = 0
            for w in self.after[v]:
                found |= below[w] | 1 << w
            below[v] = found
            for w in self.before[v]:
                waiting[w] -= 1
                if not waiting[w]:
                    ready.append(w)
        return below

    def _merge(self, v: int, u: int) -> None:
        """Merge part v into part u."""
        self.place = [u if at == v else at for at in self.place]
        self.idle.discard(v)
        for mine, theirs in ((self.after, self.before), (self.before, self.after)):
            for w in mine.pop(v):
                theirs[w].discard(v)
                if w != u:
                    theirs[w].add(u)
                    mine[u].add(w)
        for parts in self.tensors:
            if v in parts:
                parts.remove(v)
        self.tensors = [parts for parts in self.tensors if len(parts) > 1]


def merged(
    problem: DagProblem, place: list[int], members: tuple[tuple[int, ...], ...]
) -> DagProblem:
    """The problem of the parts ``members`` together, of which part i goes to ``place[i]``."""
    edges = {(place[a], place[b]) for a, b in problem.edges}
    tensors = (
        replace(one, parts=tuple(sorted({place[part] for part in one.parts})))
        for one in problem.tensors
    )
    return replace(
        problem,
        names=tuple(problem.names[its[0]] for its in members),
        edges=tuple(sorted((a, b) for a, b in edges if a != b)),
        seconds=np.array([problem.seconds[list(its)].sum(axis=0) for its in members]),
        bytes=np.array([problem.bytes[list(its)].sum() for its in members]),
        backward=None
        if problem.backward is None
        else np.array([problem.backward[list(its)].sum(axis=0) for its in members]),
        exchange=None
        if problem.exchange is None
        else np.array([problem.exchange[list(its)].sum() for its in members]),
        tensors=tuple(one for one in tensors if len(one.parts) > 1 and one.seconds),
    )


def expand(
    sets: tuple[PlacedSet, ...], members: tuple[tuple[int, ...], ...]
) -> tuple[PlacedSet, ...]:
    """The sets of merged parts as sets of the parts in them."""
    return tuple(
        replace(one, parts=tuple(sorted(i for part in one.parts for i in members[part])))
        for one in sets
    )
