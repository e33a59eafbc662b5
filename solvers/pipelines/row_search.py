"""Search for the rows of devices: rules with random parameters, then annealing of the order.

For problems with memory, and for the longest span. Candidates are timed by compiled kernels in
which transfers never wait. Where they can wait, the best rows are timed again by
``schedule_order``.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import numpy as np

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.blocks import numbering, timetable_of
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.actions import Action
from stagewright.formulations.schedules.order import B, F, I, Order, W
from stagewright.graphs.documents.arrays import Ints
from stagewright.solvers.pipelines.list_scheduling import schedule_order
from stagewright.solvers.pipelines.row_annealing import anneal_rows
from stagewright.solvers.pipelines.row_kernels import (
    NONE,
    RowTimes,
    dispatch_rows,
    time_rows,
)
from stagewright.solvers.pipelines.row_rules import RandomRule, drawn_rule, plain_rule

RULES = 0.7  # share of the time for rounds of rules; the best rows are annealed in the rest
NEW_RULES, NEW_SHARE = 200, 0.05  # rules drawn at the start of a round, and the share of them later
POOL = 20  # of the best rules, which the next ones are made from
PATIENCE = 1500  # rules without improvement after which a round ends
IMPROVEMENT = 1e-6  # relative; what is less does not count
HEATS = (3e-4, 3e-3, 3e-2)  # in units of the longest computation
CHUNK = 20_000_000  # computations timed between looks at the clock


class RowSearch:
    """The best rows so far, of the orders that are offered and of those found."""

    def __init__(self, problem: MakespanProblem, seed: int) -> None:
        self.problem, self.times = problem, row_times(problem)
        self.random = np.random.default_rng(seed)
        kinds, self.count = len(self.times.seconds), problem.microbatches
        sizes = [kinds * self.count * len(problem.stages_on(d)) for d in range(len(self.times.own))]
        self.bounds = np.cumsum([0, *sizes])
        self.starts = np.zeros((kinds * problem.stages, self.count))
        self.rows = np.zeros(self.bounds[-1], np.int64)
        self.best, self.best_cost, self.cost = self.rows.copy(), np.inf, np.inf
        self.unit = float(self.times.seconds.max())
        self.sizes = kinds, problem.stages, len(self.times.own)

    def offer(self, order: Order) -> bool:
        """Take the order if it is better; whether it is."""
        numbers = {F: 0, B: 1, I: 1, W: 2}
        stages = self.problem.stages
        codes = [numbers[one.kind] * stages + one.stage for row in order.rows for one in row]
        self.rows[:] = codes
        return self._keep(time_rows(self.times, self.rows, self.bounds, self.starts))

    def run(self, target: float, limits: Limits) -> None:
        """Search until the cost is at most ``target`` or ``limits`` end."""
        began = perf_counter()
        share = replace(limits, seconds=RULES * limits.seconds)

        def goes_on(limits: Limits = limits) -> bool:
            return self.cost > target and limits.left(perf_counter() - began) > 0

        while goes_on(share):
            rows, cost = self._round(lambda: goes_on(share))
            while goes_on(share):
                annealed = self._annealed(rows, cost, self.random.choice(HEATS))
                if annealed >= cost * (1 - IMPROVEMENT):
                    break
                cost = annealed
        while goes_on():
            self._annealed(self.best.copy(), self.best_cost, self.random.choice(HEATS))

    def try_rules(self, count: int) -> None:
        """One round of at most that many rules."""
        tries = iter(range(count))
        self._round(lambda: next(tries, None) is not None)

    def first(self) -> None:
        """Offer the rule that any problem has a schedule by."""
        self._dispatch(plain_rule(*self.sizes))

    def timetable(self) -> Timetable:
        """The best rows with their times, channels included."""
        time_rows(self.times, self.best, self.bounds, self.starts)
        if not _sends_never_wait(self.problem):
            return schedule_order(self.problem, self._order())
        problem, starts = self.problem, self.starts
        blocks = np.zeros((len(starts) + 2 * problem.stages - 2, self.count))
        forward, backward, weight = numbering(problem.stages)
        there, back, *last = starts.reshape(-1, problem.stages, self.count)
        blocks[forward], blocks[backward] = there, back
        blocks[forward[:-1] + 1] = (there + self.times.seconds[0][:, None])[:-1]
        blocks[backward[1:] + 1] = (back + self.times.seconds[1][:, None])[1:]
        if last:
            blocks[weight] = last[0]
        return timetable_of(problem, blocks)

    def _order(self) -> Order:
        kinds, stages = (F, I, W) if self.problem.is_split else (F, B), self.problem.stages
        done = np.zeros(len(self.starts), np.int64)
        rows = []
        for d in range(len(self.bounds) - 1):
            row = []
            for code in self.best[self.bounds[d] : self.bounds[d + 1]].tolist():
                row.append(Action(code % stages, kinds[code // stages], int(done[code])))
                done[code] += 1
            rows.append(tuple(row))
        return Order(tuple(rows))

    def _keep(self, cost: float) -> bool:
        """Take ``rows``, timed in ``starts``, if their cost is less."""
        if cost >= self.best_cost:
            return False
        self.best_cost, self.best[:] = cost, self.rows
        self.cost = self._objective()
        return True

    def _objective(self) -> float:
        """The makespan or longest span of ``starts``."""
        last = self.starts[-self.problem.stages :, -1]
        ends = last + self.times.seconds[-1] + self.times.tails
        if not self.times.span:
            return float(ends.max())
        own = [row[row != NONE] for row in self.times.own]
        return float(max(ends[row].max() - self.starts[row[0], 0] for row in own))

    def _round(self, goes_on: Callable[[], bool]) -> tuple[Ints, float]:
        """Draw rules, then change the best ones; the rows of the best one, and their cost."""
        pool: list[tuple[float, int, RandomRule]] = []
        tried, last, best, rows = 0, 0, np.inf, self.best.copy()
        while tried == 0 or (goes_on() and tried - last < PATIENCE):
            if not pool or tried < NEW_RULES or self.random.random() < NEW_SHARE:
                rule = drawn_rule(*self.sizes, self.random)
            else:  # the better ones more often
                rule = pool[int(len(pool) * self.random.random() ** 2)][2]
                rule = rule.changed(self.count, self.random)
            tried += 1
            cost = self._dispatch(rule)
            if np.isfinite(cost) and all(cost != other for other, *_ in pool):
                insort(pool, (cost, tried, rule), key=lambda entry: entry[:2])
                del pool[POOL:]
            if cost < best:
                last = tried if cost < best * (1 - IMPROVEMENT) else last
                best, rows[:] = cost, self.rows
        return rows, best

    def _dispatch(self, rule: RandomRule) -> float:
        form = rule.form(self.count)
        cost = float(dispatch_rows(self.times, form, self.rows, self.bounds, self.starts))
        self._keep(cost)
        return cost

    def _annealed(self, rows: Ints, cost: float, heat: float) -> float:
        """Anneal ``rows``, of this cost; the new cost."""
        steps = max(100, CHUNK // len(rows))
        anneal_rows(self.times, rows, self.bounds, cost, heat * self.unit, steps, self.random)
        self.rows[:] = rows
        cost = float(time_rows(self.times, self.rows, self.bounds, self.starts))
        self._keep(cost)
        return cost


def row_times(problem: MakespanProblem) -> RowTimes:
    """The problem for the kernels; without limits memory is infinite and nothing is taken."""
    stages, devices = problem.stages, 1 + max(problem.device)
    seconds, sends = [problem.forward, problem.backward], np.zeros((2, stages))
    if problem.weight_gradient is not None:
        seconds.append(problem.weight_gradient)
    sends[0, :-1], sends[1, :-1] = problem.send_forward, problem.send_backward
    taken, early, late = np.array(problem.saved or [(0.0, 0.0, 0.0)] * stages).T
    change = [taken, -early, -late] if problem.is_split else [taken, -taken]
    return RowTimes(
        seconds=np.array(seconds),
        sends=sends,
        tails=np.array(problem.reduce, dtype=np.float64),
        device=np.array(problem.device),
        own=_own(problem, devices),
        change=np.array(change),
        memory=np.array(problem.memory or [np.inf] * devices, dtype=np.float64),
        in_flight=np.array(problem.in_flight),
        microbatches=problem.microbatches,
        span=problem.objective == "span",
    )


def compile_row_kernels() -> None:
    """Compile the kernels, or load them, before the clock runs."""
    ones = (1.0,)
    tiny = MakespanProblem(1, ones, ones, (), (), (0.0,), (1,), weight_gradient=ones)
    search = RowSearch(tiny, seed=0)
    search.first()
    anneal_rows(search.times, search.best, search.bounds, search.best_cost, 1.0, 1, search.random)


def _own(problem: MakespanProblem, devices: int) -> Ints:
    rows = [problem.stages_on(d) for d in range(devices)]
    own = np.full((devices, max(map(len, rows))), NONE)
    for d, row in enumerate(rows):
        own[d, : len(row)] = row
    return own


def _sends_never_wait(problem: MakespanProblem) -> bool:
    """Whether each direction is a channel that is faster than what it sends for."""
    there = all(a <= b for a, b in zip(problem.send_forward, problem.forward, strict=False))
    back = all(a <= b for a, b in zip(problem.send_backward, problem.backward[1:], strict=True))
    idle = not (any(problem.send_forward) or any(problem.send_backward))
    return idle or (problem.duplex == "full" and there and back)
