"""Parts that an optimal partition has together, where memory does not bind."""

from dataclasses import replace

import numpy as np

from stagewright.formulations.dags.problem import DagProblem, PlacedSet


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
