"""Placements of least latency by CP-SAT. Times are ticks, rounded down, so that its bound holds."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from stagewright.formulations.dags.latency import HOST, Home, LatencyProblem
from stagewright.formulations.forms.ticks import in_ticks, lost_seconds, memory_shares, tick
from stagewright.graphs.documents.arrays import Ints

EXACT = 1e-9  # relative: of times added up in another order
_Literals = list[cp_model.IntVar]


class LatencyModel:
    """Positions 0 to 2k of the nodes: 2d + 1 is accelerator d, 2d the hosts before it.

    They never fall along an edge, which is contiguity. ``columns`` are the literals of node v and
    accelerator d, in this order.
    """

    def __init__(
        self,
        problem: LatencyProblem,
        positions: Sequence[int] | None,
        cost: float,
        bound: float,
        path: Sequence[int],
    ) -> None:
        """``positions`` and their ``cost``, if any are known; ``bound`` is of the ``path``."""
        self.problem = problem
        self.n, self.k = len(problem.names), problem.accelerators
        times = np.concatenate([problem.on_accelerator, problem.on_host, problem.transfer])
        most = cost if positions is not None else _longest(problem)
        times = np.minimum(times, 2 * most)
        self.unit = tick(times, most) or 1.0
        call, host, sent = (lost_seconds(one, self.unit) for one in np.split(times, 3))
        # A node is computed once; an output is sent once, and received once by each accelerator.
        lost = float(np.maximum(call, host).sum() + (1 + self.k) * sent.sum())
        self.rounding = EXACT + lost / most if most else EXACT
        ticks = in_ticks(times, self.unit).astype(np.int64)
        self.call, self.host, self.sent = (one.tolist() for one in np.split(ticks, 3))
        self.model = cp_model.CpModel()
        self.horizon = int(np.ceil(most / self.unit)) + 1
        least = max(0, int((bound - lost) / self.unit) - 1)
        self.latency = self.model.new_int_var(min(least, self.horizon), self.horizon, "latency")
        self.readers: list[list[int]] = [[] for _ in range(self.n)]
        for a, b in sorted(set(problem.edges)):
            self.readers[a].append(b)
        self._place()
        self._transfers()
        self._loads()
        self._times()
        self._follow(path)
        if positions is not None:
            self._hint(positions)
        self.model.minimize(self.latency)

    @property
    def columns(self) -> _Literals:
        """See the class."""
        return [literal for row in self.on for literal in row]

    def home(self, values: Ints) -> Home:
        """The placement of an answer."""
        on = values.reshape(self.n, self.k)
        return tuple(int(row.argmax()) if row.any() else HOST for row in on)

    def _bools(self, count: int) -> _Literals:
        return [self.model.new_bool_var("") for _ in range(count)]

    def _place(self) -> None:
        """``reached[v][p - 1]``: the position of node v is at least p; ``on`` and ``hosted``."""
        model, problem = self.model, self.problem
        self.reached = [self._bools(2 * self.k) for _ in range(self.n)]
        self.on = [self._bools(self.k) for _ in range(self.n)]
        self.hosted = self._bools(self.n)
        for v, (reached, on) in enumerate(zip(self.reached, self.on, strict=True)):
            for above, below in pairwise(reached):
                model.add_implication(below, above)
            for d in range(self.k):
                model.add(on[d] == reached[2 * d] - reached[2 * d + 1])
            model.add_exactly_one([*on, self.hosted[v]])
            least, most = int(not problem.supported[v]), int(problem.hosts)
            model.add_linear_constraint(self.hosted[v], least, most)
        for a, b in set(problem.edges):
            for p in range(2 * self.k):
                model.add_implication(self.reached[a][p], self.reached[b][p])
        for v, first in ((v, group[0]) for group in problem.groups for v in group[1:]):
            for d in range(self.k):
                model.add(self.on[v][d] == self.on[first][d])

    def _transfers(self) -> None:
        """``received[u][d]``, ``given[u][d]``: accelerator d pays for the output of node u."""
        self.received: dict[tuple[int, int], cp_model.IntVar] = {}
        self.given: dict[tuple[int, int], cp_model.IntVar] = {}
        for u, readers in enumerate(self.readers):
            for d in range(self.k if readers else 0):
                received, given = self._bools(2)
                for v in readers:
                    self.model.add(received >= self.on[v][d] - self.on[u][d])
                    self.model.add(given >= self.on[u][d] - self.on[v][d])
                self.received[u, d], self.given[u, d] = received, given

    def _loads(self) -> None:
        """The time and the memory of each accelerator; those in use come first."""
        model = self.model
        held, room = memory_shares(self.problem.bytes, self.problem.memory)
        self.load = []
        used = self._bools(self.k)
        for d in range(self.k):
            own = [row[d] for row in self.on]
            terms = [cp_model.LinearExpr.weighted_sum(own, self.call)]
            for u, readers in enumerate(self.readers):
                if readers and self.sent[u]:
                    terms.append(self.sent[u] * (self.received[u, d] + self.given[u, d]))
            load = model.new_int_var(0, self.horizon, "")
            model.add(load == cp_model.LinearExpr.sum(terms))
            self.load.append(load)
            if self.problem.bytes.sum() > self.problem.memory:
                model.add(cp_model.LinearExpr.weighted_sum(own, held) <= room)
            model.add_max_equality(used[d], own)
            if d:
                model.add_implication(used[d], used[d - 1])

    def _times(self) -> None:
        """When calls start and outputs are done."""
        model = self.model
        self.start = [model.new_int_var(0, self.horizon, "") for _ in range(self.k)]
        self.done = [model.new_int_var(0, self.horizon, "") for _ in range(self.n)]
        for v, done in enumerate(self.done):
            model.add(done >= self.host[v] * self.hosted[v])
            model.add(done <= self.latency)
            for d in range(self.k):
                ends = model.add(done >= self.start[d] + self.load[d])
                ends.only_enforce_if(self.on[v][d])
            for w in self.readers[v]:
                model.add(self.done[w] >= done + self.host[w] * self.hosted[w])
        for (u, d), received in self.received.items():
            model.add(self.start[d] >= self.done[u]).only_enforce_if(received)

    def _follow(self, path: Sequence[int]) -> None:
        """Implied: nodes and transfers of a path follow each other."""
        terms: list[cp_model.LinearExprT] = []
        for v in path:
            on_host = self.host[v] - self.call[v]
            terms.append(self.call[v] + on_host * self.hosted[v])
            if self.readers[v]:
                terms += [self.sent[v] * self.given[v, d] for d in range(self.k)]
        for a, b in pairwise(path):
            if self.sent[a]:
                (crosses,) = self._bools(1)
                for d in range(self.k):
                    self.model.add(crosses >= self.on[b][d] - self.on[a][d])
                terms.append(self.sent[a] * crosses)
        self.model.add(self.latency >= cp_model.LinearExpr.sum(terms))

    def _hint(self, positions: Sequence[int]) -> None:
        """Start from a known placement, with the accelerators that it uses first."""
        used = sorted({p for p in positions if p % 2 == 1})
        first = {p: 2 * d + 1 for d, p in enumerate(used)}
        for v, p in enumerate(positions):
            place = first.get(p, 2 * sum(q < p for q in used))
            for i, reached in enumerate(self.reached[v]):
                self.model.add_hint(reached, place >= i + 1)
            for d, on in enumerate(self.on[v]):
                self.model.add_hint(on, place == 2 * d + 1)


def _longest(problem: LatencyProblem) -> float:
    """More than the latency of any placement: everything in turn, every transfer of every call."""
    work = np.maximum(problem.on_accelerator, problem.on_host).sum()
    return float(work + (problem.accelerators + 1) * problem.transfer.sum())
