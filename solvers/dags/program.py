"""The dynamic program over a family of downsets: sets of parts, devices and the clock."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
from numba import njit

from stagewright.formulations.dags.problem import DagProblem, PlacedSet, heaviest_part, priced_load
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.dags.merging import Contents, Downsets


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


class PoolStates(NamedTuple):
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
    m: PoolStates,
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


LEAST = 1e-9  # relative improvement; less is rounding
_RANGE = 1e3  # of the costs that are looked for at once: rounding is relative to the largest time
CHUNK = 256  # downsets that are extended between two looks at the clock

Found = Callable[[tuple[PlacedSet, ...], float], None]


class DownsetProgram:
    """Partitions of a problem's parts into differences of downsets.

    ``other``: the same parts with other times, whose loads are limited to ``most_other``.
    ``prices`` are the work of a second of each pool (`best_prices`). ``pairs`` counts the sets
    whose load was computed.
    """

    def __init__(
        self,
        problem: DagProblem,
        prices: Floats,
        other: DagProblem | None = None,
        most_other: float = np.inf,
    ) -> None:
        self.problem, self.prices, self.pairs = problem, prices, 0
        self.other, self.most_other = other, most_other
        self._machines = _machines(problem, prices)

    def improve(
        self,
        lattice: Downsets,
        order: list[int],
        cost: float,
        found: Found,
        over: Callable[[], bool],
    ) -> bool:
        """Give every partition below ``cost`` that is found to ``found``; False if stopped early.

        The last one given is the best of all partitions into differences of these downsets.
        ``order`` is a topological one of the parts.
        """
        for most in self._limits(cost):
            known = self._search(lattice, order, most, found, over)
            if known is None:
                return False
            if known < most:
                return True
        return True

    def _limits(self, cost: float) -> Iterator[float]:
        """Ascending limits on the cost, up to ``cost`` itself, each ``_RANGE`` times the last.

        No cost but zero is below the first one divided by ``_RANGE``.
        """
        replicas, times = self._machines.larger.shape[2], _times(self.problem)
        least = max(heaviest_part(self.problem), priced_load(self.problem, self.prices))
        least = least or _least(times) / replicas
        limit, most = least * _RANGE, replicas * float(times.sum())
        while 0 < limit < min(cost, most):
            yield limit
            limit *= _RANGE
        yield cost

    def _search(
        self,
        lattice: Downsets,
        order: list[int],
        cost: float,
        found: Found,
        over: Callable[[], bool],
    ) -> float | None:
        """As `improve`; the cost of the best partition, or ``cost``, and None if stopped early."""
        factor = 2 * self._machines.larger.shape[2]
        other = None if self.other is None else _at_most(self.other, factor * self.most_other)
        problem = _at_most(self.problem, factor * cost)
        table = _lattice(problem, other, lattice, order, self.prices)
        n, states = len(lattice), len(self._machines.larger)
        best, came = np.full((states, n), np.inf), np.full((states, n), -1)
        best[0, 0] = 0.0
        for begin in range(0, n, CHUNK):
            if over():
                return None
            end = min(begin + CHUNK, n)
            known = cost * (1 - LEAST)
            pairs, most = extend(
                table, self._machines, begin, end, known, self.most_other, best, came
            )
            self.pairs += pairs
            if most < known:
                cost = most
                found(tuple(self._sets(lattice, best, came))[::-1], cost)
        return cost

    def _sets(self, lattice: Downsets, best: Floats, came: np.ndarray) -> Iterator[PlacedSet]:
        """The sets of the best partition of all parts, the last one first."""
        i = len(lattice) - 1
        state = int(np.argmin(best[:, i]))
        contents = Contents(lattice)
        while i:
            before = int(came[state, i])
            parts = tuple(sorted(contents.of(i) - contents.of(before)))
            one, smaller = self._step(parts, state, best[state, i], best[:, before])
            yield one
            i, state = before, smaller

    def _step(
        self, parts: tuple[int, ...], state: int, cost: float, before: Floats
    ) -> tuple[PlacedSet, int]:
        """The last set, and the state without its devices."""
        held = float(sum(self.problem.bytes[part] for part in parts))
        places = np.argwhere(self._machines.larger == state).tolist()
        for smaller, pool, more in sorted(places, key=lambda place: place[1:]):
            load = self.problem.load(parts, pool, more + 1)
            fits = held <= self._machines.memory[pool]
            if self.other is not None:
                fits &= self.other.load(parts, pool, more + 1) <= self.most_other * (1 + LEAST)
            if fits and max(before[smaller], load) <= cost * (1 + RELATIVE_TOLERANCE):
                return PlacedSet(pool, parts, more + 1), smaller
        raise AssertionError("no set leads to this partition")


def _times(problem: DagProblem) -> Floats:
    """All times that a load may have."""
    exchange = () if problem.exchange is None else problem.exchange
    sent = [one.seconds for one in problem.tensors]
    return np.concatenate([problem.seconds.ravel(), sent, exchange])


def _at_most(problem: DagProblem, seconds: float) -> DagProblem:
    """The problem with longer times cut to ``seconds``, and bytes to what fits nowhere.

    Sums of the others are not rounded to the digits of times and bytes that no set may have.
    """
    times = _times(problem)
    seconds = seconds or _least(times)
    room = max((2 * pool.memory for pool in problem.pools if pool.memory < np.inf), default=np.inf)
    room = room or _least(problem.bytes)
    if times.max() <= seconds and problem.bytes.max() <= room:
        return problem
    exchange = problem.exchange
    return replace(
        problem,
        seconds=np.minimum(problem.seconds, seconds),
        bytes=np.minimum(problem.bytes, room),
        tensors=tuple(replace(one, seconds=min(one.seconds, seconds)) for one in problem.tensors),
        backward=None,
        exchange=None if exchange is None else np.minimum(exchange, seconds),
    )


def _least(values: Floats) -> float:
    """The least of the values that are not zero; zero if there is none."""
    return float(min(values[values > 0], default=0.0))


def _machines(problem: DagProblem, prices: Floats) -> PoolStates:
    counts = [pool.count for pool in problem.pools]
    states = list(product(*(range(count + 1) for count in counts)))
    number = {state: s for s, state in enumerate(states)}
    replicas = min(problem.most_replicas, max(counts))
    larger = np.full((len(states), len(counts), replicas), -1)
    for (s, state), k, r in product(enumerate(states), range(len(counts)), range(replicas)):
        more = (*state[:k], state[k] + r + 1, *state[k + 1 :])
        larger[s, k, r] = number.get(more, -1)
    left = (np.array(counts) - np.array(states)) @ prices
    return PoolStates(
        memory=np.array([pool.memory * (1 + RELATIVE_TOLERANCE) for pool in problem.pools]),
        pays=np.array([pool.pays_transfers for pool in problem.pools], dtype=np.int64),
        larger=larger,
        left=left * (1 + RELATIVE_TOLERANCE),
    )


def _lattice(
    problem: DagProblem,
    other: DagProblem | None,
    lattice: Downsets,
    order: list[int],
    prices: Floats,
) -> Lattice:
    n, pools = problem.seconds.shape
    exchange = np.zeros(n) if problem.exchange is None else problem.exchange
    work = (problem.seconds * prices).min(axis=1)
    second = np.zeros_like(problem.seconds) if other is None else other.seconds
    rows = np.column_stack([problem.seconds, problem.bytes, work, exchange, second])
    total = np.zeros((len(lattice), rows.shape[1]))
    source = np.repeat(np.arange(len(lattice)), np.diff(lattice.first))
    # Downsets ascend by size, so that a sum is complete before another is made from it.
    first = np.unique(lattice.target, return_index=True)[1]
    for e in first.tolist():
        total[lattice.target[e]] = total[source[e]] + rows[lattice.node[e]]
    own: list[list[int]] = [[] for _ in range(n)]
    tensors = (*problem.tensors, *(() if other is None else other.tensors))
    sent = np.array([one.seconds for one in tensors])
    is_own = np.arange(len(tensors)) < len(problem.tensors)
    for t, one in enumerate(tensors):
        for part in one.parts:
            own[part].append(t)
    return Lattice(
        first=lattice.first,
        node=lattice.node,
        target=lattice.target,
        rank=np.argsort(order),
        seconds=np.ascontiguousarray(total[:, :pools].T),
        held=np.ascontiguousarray(total[:, pools]),
        work=np.ascontiguousarray(total[:, pools + 1]),
        exchange=np.ascontiguousarray(total[:, pools + 2]),
        of=np.cumsum([0, *map(len, own)]),
        tensor=np.array([t for its in own for t in its], dtype=np.int64),
        cost=np.where(is_own, sent, 0.0),
        size=np.array([len(one.parts) for one in tensors], dtype=np.int64),
        other=np.ascontiguousarray(total[:, pools + 3 :].T),
        other_cost=np.where(is_own, 0.0, sent),
    )
