"""The partition with the least largest load, contiguous or not, by CP-SAT.

A pipeline cannot run through sets that are not contiguous without a sample passing a device twice;
its throughput is the same. Times are ticks, rounded down, so that CP-SAT's bound holds.
"""

from time import perf_counter

import numpy as np
from ortools.sat.python import cp_model

from stagewright.formulations.dags.problem import DagProblem, PlacedSet
from stagewright.formulations.forms.answers import Limits, OnProgress, Status, silent
from stagewright.formulations.forms.models import in_ticks, lost_seconds, memory_shares, tick
from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.solvers.backends.cpsat import run_model
from stagewright.solvers.dags.merging import expand, merge
from stagewright.solvers.dags.partition import DagResult

FREE = "CP-SAT over all partitions"
EXACT = 1e-9  # relative: of times added up in another order


def free_partition(
    problem: DagProblem,
    start: DagResult,
    limits: Limits | None = None,
    on_progress: OnProgress = silent,
) -> DagResult:
    """The best partition that need not be contiguous; never worse than ``start``, if that has one.

    The bound holds for every partition.
    """
    began, limits = perf_counter(), limits or Limits()
    model = _FreeModel(problem, start)
    answer = run_model(
        model.model, model.columns, cp_model.CpSolver(), limits, on_progress, perf_counter()
    )
    sets, cost = start.sets, np.inf if start.cost is None else start.cost
    if answer.values is not None:
        found = model.sets(answer.values)
        try:
            seconds = problem.evaluate(found, contiguous=False)
        except InvalidPlan:  # by a rounding of bytes
            seconds = np.inf
        if seconds < cost:
            sets, cost = found, seconds
    infeasible = answer.status is Status.INFEASIBLE
    bound = np.inf if infeasible else max(0.0, answer.bound * model.unit)
    optimal = answer.status is Status.OPTIMAL and bound >= cost * (1 - model.rounding)
    status = Status.OPTIMAL if optimal else limits.status(found=sets is not None)
    return DagResult(
        sets=sets,
        cost=None if sets is None else cost,
        bound=min(bound, cost),
        proved_by=FREE,
        status=Status.INFEASIBLE if infeasible else status,
        downsets=start.downsets,
        pairs=start.pairs,
        seconds=perf_counter() - began,
    )


class _FreeModel:
    """A device for every part, and for every tensor whether a set has some or all of its parts."""

    def __init__(self, problem: DagProblem, start: DagResult) -> None:
        self.problem, self.members = merge(problem)
        self.devices = [k for k, pool in enumerate(problem.pools) for _ in range(pool.count)]
        n, m = len(self.problem.names), len(self.devices)
        sent = np.array([one.seconds for one in self.problem.tensors])
        times = np.concatenate([self.problem.seconds.ravel(), sent])
        most = start.cost or float(times.sum())
        self.unit = tick(times, most) or 1.0
        work, sent = (np.minimum(one, 2 * most) for one in (self.problem.seconds, sent))
        lost = lost_seconds(work, self.unit).max(axis=1).sum() + lost_seconds(sent, self.unit).sum()
        self.rounding = EXACT + float(lost) / most if most else EXACT
        self.work = in_ticks(work, self.unit).astype(np.int64)
        self.sent = in_ticks(sent, self.unit).astype(np.int64)
        self.model = cp_model.CpModel()
        self.place = [[self.model.new_bool_var("") for _ in range(m)] for _ in range(n)]
        self.columns = [literal for row in self.place for literal in row]
        horizon = int(np.ceil(most / self.unit)) + 1
        self.load = self.model.new_int_var(0, horizon, "load")
        for row in self.place:
            self.model.add_exactly_one(row)
        for d in range(m):
            self._limit(d)
        self._number_devices()
        self.model.minimize(self.load)
        if start.sets is not None:
            self._hint(start.sets)

    def sets(self, values: Ints) -> tuple[PlacedSet, ...]:
        """The sets of an answer that have parts."""
        home = values.reshape(len(self.place), len(self.devices)).argmax(axis=1)
        placed = (
            PlacedSet(k, tuple(np.flatnonzero(home == d).tolist()))
            for d, k in enumerate(self.devices)
        )
        return expand(tuple(one for one in placed if one.parts), self.members)

    def _limit(self, d: int) -> None:
        """The load and the memory of a device."""
        pool = self.problem.pools[self.devices[d]]
        own = [row[d] for row in self.place]
        terms = [cp_model.LinearExpr.weighted_sum(own, self.work[:, self.devices[d]].tolist())]
        if pool.pays_transfers:
            terms += self._cuts(own)
        self.model.add(cp_model.LinearExpr.sum(terms) <= self.load)
        if self.problem.bytes.sum() > pool.memory:
            held, room = memory_shares(self.problem.bytes, pool.memory)
            self.model.add(cp_model.LinearExpr.weighted_sum(own, held) <= room)

    def _cuts(self, own: list[cp_model.IntVar]) -> list[cp_model.LinearExpr]:
        """The ticks of every tensor that is cut: some, not all of its parts are on the device."""
        terms: list[cp_model.LinearExpr] = []
        for one, ticks in zip(self.problem.tensors, self.sent.tolist(), strict=True):
            if not ticks:
                continue
            if len(one.parts) == 2:
                apart = self.model.new_bool_var("")
                a, b = (own[part] for part in one.parts)
                self.model.add(apart >= a - b)
                self.model.add(apart >= b - a)
                terms.append(ticks * apart)
                continue
            some, whole = self.model.new_bool_var(""), self.model.new_bool_var("")
            for part in one.parts:
                self.model.add_implication(own[part], some)
                self.model.add_implication(whole, own[part])
            terms.append(ticks * (some - whole))
        return terms

    def _number_devices(self) -> None:
        """Equal devices are interchangeable: the first parts use the first of them."""
        first = 0
        for pool in self.problem.pools:
            for i in range(min(pool.count, len(self.place))):
                for d in range(first + i + 1, first + pool.count):
                    self.model.add(self.place[i][d] == 0)
            first += pool.count

    def _hint(self, sets: tuple[PlacedSet, ...]) -> None:
        """Start from a known partition, with its devices numbered as the model numbers them."""
        home = {i: number for number, one in enumerate(sets) for i in one.parts}
        device: dict[int, int] = {}
        first = np.cumsum([0, *(pool.count for pool in self.problem.pools)])
        used = [0] * len(self.problem.pools)
        for i, its in enumerate(self.members):
            number = home[its[0]]
            if number not in device:
                k = sets[number].pool
                device[number] = int(first[k]) + used[k]
                used[k] += 1
            for d, literal in enumerate(self.place[i]):
                self.model.add_hint(literal, d == device[number])
