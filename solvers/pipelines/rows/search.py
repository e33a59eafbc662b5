"""Search for the rows of devices: random rules, shifts of the starts, annealing of the order.

For problems with memory, and for the longest span. Candidates are timed by compiled kernels in
which transfers never wait. Where they can wait, the best rows are timed again by
``schedule_order``.
"""

from bisect import insort
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from threading import Event
from time import perf_counter

import numpy as np

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.blocks import numbering, timetable_of
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.actions import Action
from stagewright.formulations.schedules.order import B, F, I, Order, W
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.list_scheduling import schedule_order
from stagewright.solvers.pipelines.rows.annealing import anneal_rows
from stagewright.solvers.pipelines.rows.kernels import (
    NONE,
    RowRule,
    RowTimes,
    dispatch_rows,
    keeps_limits,
    time_rows,
)
from stagewright.solvers.pipelines.rows.rules import RandomRule, drawn_rule, plain_rule

SIZES = (0.1, 0.3, 1.0, 3.0, 10.0)  # of a shift, in units of the longest computation
SHARES = (0.01, 0.1, 0.5)  # of the computations that noise changes
_WIDTHS = (3.0, 10.0, 30.0)  # of a window of time, in the same units


def shifted(starts: Floats, device: Ints, unit: float, random: np.random.Generator) -> Floats:
    """``starts`` (K x S, M) after one to three random shifts; ``device`` (S,) of each stage."""
    changed, kinds = starts.copy(), len(starts) // len(device)
    for _ in range(random.integers(1, 4)):
        size, draw = unit * random.choice(SIZES), random.random()
        if draw < 0.4:
            _shift_kind(changed, device, kinds, size, random)
        elif draw < 0.8:
            near = np.abs(starts - random.uniform(0.0, starts.max())) < unit * random.choice(
                _WIDTHS
            )
            near &= (np.tile(device, kinds) == random.choice(device))[:, None]
            changed[near] += size * random.normal(size=int(near.sum()))
        else:
            some = random.random(starts.shape) < random.choice(SHARES)
            changed[some] += size * random.normal(size=int(some.sum()))
    return changed


def _shift_kind(
    changed: Floats, device: Ints, kinds: int, size: float, random: np.random.Generator
) -> None:
    """Shift one kind of computation on neighbouring devices, for microbatches in sequence."""
    count = changed.shape[1]
    first = random.integers(1 + device.max())
    last = first + (random.integers(1 + device.max()) if random.random() < 0.5 else 0)
    stages = np.flatnonzero((device >= first) & (device <= last))
    if random.random() < 0.5:
        stages = random.choice(stages, 1)
    begin, end = 0, count
    if random.random() < 0.7:
        begin = int(random.integers(count))
        end = begin + 1 + int(random.exponential(count / 4))
    rows = random.integers(kinds) * len(device) + stages
    changed[rows, begin:end] += size * random.normal()


RULES = 0.7  # share of the time for rounds of rules; the best rows are changed in the rest
NEW_RULES, NEW_SHARE = 200, 0.05  # rules drawn at the start of a round, and the share of them later
POOL = 20  # of the best rules, which the next ones are made from
PATIENCE = 1500  # rules without improvement after which a round ends
IMPROVEMENT = 1e-6  # relative; what is less does not count
_HEATS = (3e-2, 3e-4)  # of annealing, first and last, in units of the longest computation
STEP_SECONDS = 1e-6  # of annealing, per computation, before it is measured
CHUNK = 5_000_000  # moves of annealing times computations, between looks at the clock
SHIFTS = 200  # shifted schedules without improvement after which annealing has its turn
_HEAT = 3e-3  # of the search by shifts, in the same units
_EAGER = (0.0, 0.25, 0.5, 1.0)


class RowSearch:
    """The best rows so far, among offered orders and orders found by the search."""

    def __init__(
        self,
        problem: MakespanProblem,
        seed: int,
        on_better: Callable[[float], None] = lambda cost: None,
    ) -> None:
        """``on_better`` is told every lower cost, unless transfers may still change it."""
        self.problem, self.times, self.on_better = problem, _row_times(problem), on_better
        self.is_exact = _sends_never_wait(problem)
        self.random = np.random.default_rng(seed)
        kinds, self.count = len(self.times.seconds), problem.microbatches
        sizes = [kinds * self.count * len(problem.stages_on(d)) for d in range(len(self.times.own))]
        self.bounds = np.cumsum([0, *sizes])
        self.starts = np.zeros((kinds * problem.stages, self.count))
        self.rows = np.zeros(self.bounds[-1], np.int64)
        self.best, self.best_cost, self.cost = self.rows.copy(), np.inf, np.inf
        self.unit = float(self.times.seconds.max())
        self.sizes = kinds, problem.stages, len(self.times.own)
        self.step_seconds = STEP_SECONDS * len(self.rows)  # of annealing, measured as it goes on

    def offer(self, order: Order) -> bool:
        """Keep the order if it is better than the best; return whether it was kept."""
        numbers = {F: 0, B: 1, I: 1, W: 2}
        stages = self.problem.stages
        codes = [numbers[one.kind] * stages + one.stage for row in order.rows for one in row]
        self.rows[:] = codes
        return self._keep(time_rows(self.times, self.rows, self.bounds, self.starts))

    def run(self, target: float, limits: Limits, over: Event | None = None) -> None:
        """Search until the cost is at most ``target``, ``limits`` end or it is ``over``."""
        began, over = perf_counter(), over or Event()
        share = replace(limits, seconds=RULES * limits.seconds)

        def left(limits: Limits = limits) -> float:
            on = self.cost > target and not over.is_set()
            return limits.left(perf_counter() - began) if on else 0.0

        while left(share) > 0:
            rows = self._round(lambda: left(share) > 0)
            self._annealed(rows, left(share))
        while left() > 0:
            self._shifted(lambda: left() > 0)
            self._annealed(self.best.copy(), left())
        over.set()

    def try_rules(self, count: int) -> None:
        """One round of at most that many rules."""
        tries = iter(range(count))
        self._round(lambda: next(tries, None) is not None)

    def take(self, other: "RowSearch") -> None:
        """Take the best rows of another search of the same problem, if they are better."""
        self.rows[:] = other.best
        self._keep(float(time_rows(self.times, self.rows, self.bounds, self.starts)))

    def first(self) -> None:
        """Offer the rule that any problem has a schedule by."""
        self._dispatch(plain_rule(*self.sizes))

    def timetable(self) -> Timetable:
        """The best rows with their times, channels included."""
        time_rows(self.times, self.best, self.bounds, self.starts)
        if not self.is_exact:
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
        before, self.cost = self.cost, self._objective()
        if self.is_exact and self.cost < before:
            self.on_better(self.cost)
        return True

    def _objective(self) -> float:
        """The makespan or longest span of ``starts``."""
        last = self.starts[-self.problem.stages :, -1]
        ends = last + self.times.seconds[-1] + self.times.tails
        if not self.times.span:
            return float(ends.max())
        own = [row[row != NONE] for row in self.times.own]
        return float(max(ends[row].max() - self.starts[row[0], 0] for row in own))

    def _round(self, goes_on: Callable[[], bool]) -> Ints:
        """Draw rules and change the best rules; return the rows of the best rule."""
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
        return rows

    def _dispatch(self, rule: RandomRule) -> float:
        form = rule.form(self.count)
        cost = float(dispatch_rows(self.times, form, self.rows, self.bounds, self.starts))
        self._keep(cost)
        return cost

    def _annealed(self, rows: Ints, seconds: float) -> None:
        """Anneal ``rows`` for at most about that many seconds."""
        heats = _HEATS[0] * self.unit, _HEATS[1] * self.unit
        steps = int(min(CHUNK / len(rows), seconds / self.step_seconds))
        if steps <= 0:
            return
        began = perf_counter()
        anneal_rows(self.times, rows, self.bounds, heats, steps, self.random)
        self.step_seconds = (perf_counter() - began) / steps
        kept = (
            keeps_limits(self.times, rows, begin, end, d)
            for d, (begin, end) in enumerate(pairwise(self.bounds))
        )
        if all(kept):  # amounts of memory summed in another order may break limits
            self.rows[:] = rows
            self._keep(float(time_rows(self.times, self.rows, self.bounds, self.starts)))

    def _shifted(self, goes_on: Callable[[], bool]) -> None:
        """Dispatch by the starts of the best rows after random shifts, then by those found."""
        time_rows(self.times, self.best, self.bounds, self.starts)
        device, most = self.times.device, self.count * self.problem.stages
        unlimited = np.full(self.problem.stages, most), np.full(len(self.times.own), most)
        base, cost, tried, last = self.starts.copy(), self.best_cost, 0, 0
        while goes_on() and tried - last < SHIFTS:
            tried += 1
            urgency = shifted(base, device, self.unit, self.random)
            form = RowRule(urgency, *unlimited, float(self.random.choice(_EAGER)), clears=False)
            found = float(dispatch_rows(self.times, form, self.rows, self.bounds, self.starts))
            last = tried if found < self.best_cost * (1 - IMPROVEMENT) else last
            worse = found - cost
            if worse <= 0 or self.random.random() < np.exp(-worse / (_HEAT * self.unit)):
                base[:], cost = self.starts, found
            self._keep(found)


def run_together(search: RowSearch, target: float, limits: Limits) -> None:
    """Run ``search``, and others in further threads, until one is at the target or limits end.

    Kernels run without Python's lock. Only ``search`` reports, and it takes the best rows found.
    """
    others = [RowSearch(search.problem, limits.seed + k) for k in range(1, limits.threads)]
    over = Event()
    with ThreadPoolExecutor(limits.threads) as pool:
        for one in others:
            one.take(search)
        running = [pool.submit(one.run, target, limits, over) for one in others]
        try:
            search.run(target, limits, over)
        finally:
            over.set()
        for one, run in zip(others, running, strict=True):
            run.result()
            search.take(one)


def _row_times(problem: MakespanProblem) -> RowTimes:
    """The problem for the kernels; without limits memory is infinite and nothing is taken."""
    stages, devices = problem.stages, 1 + max(problem.device)
    seconds = [problem.forward, problem.backward]
    if problem.weight_gradient is not None:
        seconds.append(problem.weight_gradient)
    before, lag = _waits(problem, np.array(seconds))
    taken, early, late = np.array(problem.saved or [(0.0, 0.0, 0.0)] * stages).T
    change = [taken, -early, -late] if problem.is_split else [taken, -taken]
    return RowTimes(
        seconds=np.array(seconds),
        before=before,
        lag=lag,
        tails=np.array(problem.reduce, dtype=np.float64),
        device=np.array(problem.device),
        own=_own(problem, devices),
        change=np.array(change),
        memory=np.array(problem.memory or [np.inf] * devices, dtype=np.float64),
        in_flight=np.array(problem.in_flight),
        microbatches=problem.microbatches,
        span=problem.objective == "span",
    )


def _waits(problem: MakespanProblem, seconds: Floats) -> tuple[Ints, Floats]:
    """The code that each code waits for, and the time from its start; kinds x S values each."""
    stages = np.arange(problem.stages)
    before = np.array([stages - 1, stages + 1 + problem.stages, stages + problem.stages])
    before[0, 0], before[1, -1] = NONE, problem.stages - 1  # a microbatch starts, and turns
    before = before[: len(seconds)].ravel()
    lag = np.where(before == NONE, 0.0, seconds.ravel()[before])
    lag[1 : problem.stages] += problem.send_forward
    lag[problem.stages : 2 * problem.stages - 1] += problem.send_backward
    return before, lag


def compile_row_kernels() -> None:
    """Compile the kernels, or load them, before the clock runs."""
    ones = (1.0,)
    tiny = MakespanProblem(1, ones, ones, (), (), (0.0,), (1,), weight_gradient=ones)
    search = RowSearch(tiny, seed=0)
    search.first()
    anneal_rows(search.times, search.rows, search.bounds, _HEATS, 1, search.random)
    keeps_limits(search.times, search.rows, 0, 3, 0)


def _own(problem: MakespanProblem, devices: int) -> Ints:
    rows = [problem.stages_on(d) for d in range(devices)]
    own = np.full((devices, max(map(len, rows))), NONE)
    for d, row in enumerate(rows):
        own[d, : len(row)] = row
    return own


def _sends_never_wait(problem: MakespanProblem) -> bool:
    """Whether sends never wait: each direction's channel is faster than the computations."""
    there = all(a <= b for a, b in zip(problem.send_forward, problem.forward, strict=False))
    back = all(a <= b for a, b in zip(problem.send_backward, problem.backward[1:], strict=True))
    idle = not (any(problem.send_forward) or any(problem.send_backward))
    return idle or (problem.duplex == "full" and there and back)
