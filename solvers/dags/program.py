"""The dynamic program over a family of downsets: sets of parts, devices and the clock."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from stagewright.formulations.dags.bounds import heaviest_part, priced_load
from stagewright.formulations.dags.problem import DagProblem, PlacedSet
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.dags.downsets import Contents, Downsets
from stagewright.solvers.dags.kernel import Lattice, Machines, extend

LEAST = 1e-9  # relative improvement; less is rounding
RANGE = 1e3  # of the costs that are looked for at once: rounding is relative to the largest time
CHUNK = 256  # downsets that are extended between two looks at the clock

Found = Callable[[tuple[PlacedSet, ...], float], None]


class Program:
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
        """Ascending limits on the cost, up to ``cost`` itself, each ``RANGE`` times the one before.

        No cost but zero is below the first one divided by ``RANGE``.
        """
        replicas, times = self._machines.larger.shape[2], _times(self.problem)
        least = max(heaviest_part(self.problem), priced_load(self.problem, self.prices))
        least = least or _least(times) / replicas
        limit, most = least * RANGE, replicas * float(times.sum())
        while 0 < limit < min(cost, most):
            yield limit
            limit *= RANGE
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


def _machines(problem: DagProblem, prices: Floats) -> Machines:
    counts = [pool.count for pool in problem.pools]
    states = list(product(*(range(count + 1) for count in counts)))
    number = {state: s for s, state in enumerate(states)}
    replicas = min(problem.most_replicas, max(counts))
    larger = np.full((len(states), len(counts), replicas), -1)
    for (s, state), k, r in product(enumerate(states), range(len(counts)), range(replicas)):
        more = (*state[:k], state[k] + r + 1, *state[k + 1 :])
        larger[s, k, r] = number.get(more, -1)
    left = (np.array(counts) - np.array(states)) @ prices
    return Machines(
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
