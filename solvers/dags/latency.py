"""The placement of an operator graph with the least latency, and a bound on it.

Topological orders are divided into calls and host segments that follow each other, which is best
for chains; annealing improves the best of them; paths of the graph give a bound; and CP-SAT closes
the gap that is left, if there is time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter

import numpy as np
from ortools.sat.python import cp_model

from stagewright.formulations.dags.latency import HOST, Home, LatencyProblem
from stagewright.formulations.dags.latency_bounds import PathBound
from stagewright.formulations.forms.answers import (
    Bounded,
    Limits,
    OnProgress,
    Progress,
    Status,
    settled,
    silent,
)
from stagewright.formulations.forms.models import in_ticks, lost_seconds, memory_shares, tick
from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.solvers.backends.cpsat import run_model
from stagewright.solvers.dags.latency_search import LatencySearch

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


PATHS, PROGRAM = "paths cut into calls", "CP-SAT over all placements"
LEAST = 1e-9  # relative gap of an optimal answer
SHARE = 0.5  # of the time for annealing


@dataclass(frozen=True, slots=True, eq=False)
class LatencyResult(Bounded):
    """The best placement found, and a bound on the latency of every one (seconds).

    ``home`` is that of `LatencyProblem.evaluate`; None if nothing was found.
    """

    home: Home | None
    cost: float | None
    bound: float
    proved_by: str
    status: Status
    seconds: float


def place_for_latency(
    problem: LatencyProblem, limits: Limits | None = None, on_progress: OnProgress = silent
) -> LatencyResult:
    """The best placement found within ``limits``; optimal if it is proved to be."""
    return _BestPlacement(problem, limits or Limits(), on_progress).run()


class _BestPlacement:
    """The best placement, the best bound, and the clock."""

    def __init__(self, problem: LatencyProblem, limits: Limits, on_progress: OnProgress) -> None:
        self.began, self.limits, self.on_progress = perf_counter(), limits, on_progress
        self.problem = problem
        self.home: Home | None = None
        self.cost, self.bound, self.proved_by = np.inf, 0.0, PATHS
        self.path: tuple[int, ...] = ()

    def run(self) -> LatencyResult:
        """See `place_for_latency`."""
        search = LatencySearch(self.problem, self.limits.seed, self._keep)
        search.divide_orders(self._over())
        for bound, path in PathBound(self.problem).of_heavy_paths():
            if bound > self.bound:
                self.bound, self.path = bound, path
            if self._over(SHARE)():
                break
        search.anneal(self._over(SHARE))
        if self.bound == np.inf:
            return self._result(Status.INFEASIBLE)
        if self._over()():
            return self._result(self.limits.status(found=self.home is not None))
        return self._result(self._prove(search.by_node()))

    def _prove(self, positions: list[int] | None) -> Status:
        """Prove the placement optimal, or improve it, by CP-SAT in the remaining time."""
        model = LatencyModel(self.problem, positions, self.cost, self.bound, self.path)
        limits = replace(self.limits, seconds=self.limits.left(perf_counter() - self.began))
        answer = run_model(
            model.model, model.columns, cp_model.CpSolver(), limits, self._report, perf_counter()
        )
        if answer.status is Status.INFEASIBLE:
            self.bound, self.proved_by = np.inf, PROGRAM
            return Status.INFEASIBLE
        if answer.values is not None:
            self._keep(model.home(answer.values))
        if answer.bound * model.unit > self.bound:
            self.bound, self.proved_by = answer.bound * model.unit, PROGRAM
        if answer.status is Status.OPTIMAL and self._is_within(model.rounding):
            return Status.OPTIMAL
        return self.limits.status(found=self.home is not None)

    def _keep(self, home: Home) -> None:
        """Remember the placement if it is better."""
        try:
            cost = self.problem.evaluate(home)
        except InvalidPlan:  # by a rounding of bytes in CP-SAT
            return
        if cost < self.cost:
            self.home, self.cost = home, cost
            self._report(Progress(perf_counter(), cost, 0.0))

    def _report(self, _: Progress) -> None:
        """Report the best placement; CP-SAT's placements count only after they are evaluated."""
        seconds = perf_counter() - self.began
        cost = None if self.home is None else self.cost
        self.on_progress(Progress(seconds, cost, min(self.bound, self.cost)))

    def _over(self, share: float = 1.0) -> Callable[[], bool]:
        """Whether a share of the time is over, or the gap is as small as asked."""

        def over() -> bool:
            elapsed = perf_counter() - self.began
            late = elapsed >= share * self.limits.seconds or self.limits.left(elapsed) == 0
            return late or self._is_within(max(self.limits.gap, LEAST))

        return over

    def _is_within(self, gap: float) -> bool:
        return self.home is not None and self.cost - self.bound <= gap * self.cost

    def _result(self, status: Status) -> LatencyResult:
        cost = None if self.home is None else self.cost
        return LatencyResult(
            home=self.home,
            cost=cost,
            bound=min(self.bound, self.cost),
            proved_by=self.proved_by,
            status=settled(status, cost, self.bound, LEAST),
            seconds=perf_counter() - self.began,
        )
