"""The exact joint optimum of periodic plans: enumerated allocations, best-first patterns.

A compiled depth-first search enumerates all allocations, from the last stage to the first, and
prunes those that a trial length of the iteration refutes. The pause for the updates of an
allocation determines the period for a given length. A pattern that is feasible at some period is
feasible at every longer one (scale all starts), so a refuted length is a lower bound. Allocations
are enumerated in windows of their bounds, and patterns are solved in order of these bounds.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.patterns.joint_patterns import JointForm, JointPatterns
from stagewright.formulations.patterns.one_f_one_b import pattern_load_bound, period_bound
from stagewright.formulations.patterns.order_model import OrderModel, least_pattern
from stagewright.formulations.patterns.pattern import Pattern, PatternProblem
from stagewright.formulations.patterns.pattern_models import ByRate
from stagewright.formulations.patterns.pattern_problems import PatternProblems
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.backends.backend import solve
from stagewright.solvers.best_first import BestFirst
from stagewright.solvers.patterns.allocation_walk import FLIGHT, ROW, SUMS, walk
from stagewright.solvers.patterns.completion import completion
from stagewright.solvers.patterns.pattern import SAFETY, best_pattern

_BEGINNING = 0.6  # share of the time limit for finding the first window
_TRIAL = 0.1  # share of the time limit for one trial of that
_SAMPLING = 0.9  # share of the time limit after which no more random allocations are tried
SHARES = (0.9, 0.75, 0.6, 0.45, 0.3) * 4  # of the way from the bound to the best plan
_TRYING = 0.1  # share of the time limit for the pattern of an allocation of a trial
STEP = 0.005  # relative width of the first window of bounds
_WIDER = 1.5  # factor of the width from one window to the next
STEPS = 100_000  # of the enumeration per call, some tenths of a second
BATCH = 1024  # allocations per call
DONE = (Status.OPTIMAL, Status.INFEASIBLE)


@dataclass(frozen=True, slots=True, eq=False)
class JointAnswer:
    """The best plan found, and a proved bound on the iteration of every plan, in seconds.

    ``stages``, ``pattern`` and ``cost`` are None if no plan was found in time, or if none fits; in
    that case ``bound`` is inf. ``complete``: the search ended before the time limit.
    ``allocations`` counts those compared with the best plan, ``solves`` the pattern solves.
    """

    stages: tuple[Stage, ...] | None
    pattern: Pattern | None
    cost: float | None
    bound: float
    complete: bool
    allocations: int
    solves: int

    @property
    def period(self) -> float | None:
        """The pattern's period."""
        return None if self.pattern is None else self.pattern.period


def joint_optimum(
    question: JointPatterns,
    limits: Limits,
    incumbent: tuple[tuple[Stage, ...], Pattern] | None = None,
) -> JointAnswer:
    """The shortest iteration over all allocations and patterns.

    Every layer has one group; consecutive layers of one group form one stage, with one forward and
    one backward (MadPipe's stages); nothing is offloaded. For short chains: 10 layers on 4 groups
    take seconds, 18 layers half a minute. ``incumbent`` is a known plan.

    Raises InvalidPlan if the incumbent breaks a rule.
    """
    search = JointSearch(question, limits, incumbent)
    complete = search.run()
    stages, pattern = search.best or (None, None)
    cost = search.cost if search.best else None
    counts = (search.allocations, search.solves)
    return JointAnswer(stages, pattern, cost, search.bound(), complete, *counts)


class BoundWindow(NamedTuple):
    """All allocations whose bounds are between two lengths of the iteration."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, eq=False)
class AllocationCandidate:
    """An allocation without a pattern yet: start, group and mode of the stages, shape (N, 3).

    The last stage comes first; rows after the first stage are -1.
    """

    rows: Ints


class PatternFound(NamedTuple):
    """A pattern or None, a bound on its period, and whether the solve is complete."""

    pattern: Pattern | None
    bound: float
    done: bool


class JointSearch(BestFirst[BoundWindow | AllocationCandidate]):
    """The search over windows of allocations and candidates."""

    def __init__(
        self,
        question: JointPatterns,
        limits: Limits,
        incumbent: tuple[tuple[Stage, ...], Pattern] | None,
    ) -> None:
        super().__init__(limits)
        self.question = question
        self.best: tuple[tuple[Stage, ...], Pattern] | None = None
        self.allocations = self.solves = 0
        self._proved: dict[bytes, float] = {}  # bounds of allocations that were tried
        self._problems = PatternProblems(question.problem)
        if incumbent is not None:
            self._offer(*incumbent)
        self._longest = longest_iteration(question.form)

    def run(self) -> bool:
        """Search until the heap is empty (True) or the time limit is reached (False)."""
        self._begin()
        while self._heap:
            attempt, bound, item = self._pop()
            if bound >= self._ceiling():
                self._close(bound)
            elif self._left() <= 0:
                self._push(bound, item, attempt)
                return False
            elif isinstance(item, AllocationCandidate):
                self._solve(item, bound, attempt)
            else:
                self._open(item, bound)
        return True

    def _begin(self) -> None:
        """Push the first nonempty window, found by bisection.

        If a trial takes too long, shorter lengths are tried, each for a share of the time limit: a
        refuted length is still a lower bound.
        """
        low, high = _shortest_iteration(self.question.form), min(self._longest, self._ceiling())
        in_time, known = self._first(high, _TRIAL)
        if in_time and known is None:
            self._close(high if high < self._longest else math.inf)
            return
        # Short trials first: most lengths are refuted by the tables alone, or not for long.
        low, _, rows, _ = self._narrow(low, high, 0.0)
        low, high, last, in_all_time = self._narrow(low, min(high, self._ceiling()), _TRIAL)
        known = next((one for one in (last, rows) if one is not None), known)
        if known is not None and not (in_time and in_all_time):
            # The first window will take long, so this allocation is the first candidate.
            self._push(low, AllocationCandidate(known))
            self._sample(low)
        self._push(low, BoundWindow(0.0, min(high, self._ceiling())))

    def _narrow(
        self, low: float, high: float, share: float
    ) -> tuple[float, float, Ints | None, bool]:
        """Bisect the least length that is not refuted, each trial for a share of the time limit.

        Returns both ends, the last allocation that passed, and whether every trial was in time.
        """
        known, all_in_time = None, True
        while high > low * (1 + STEP) and self._left() > (1 - _BEGINNING) * self.limits.seconds:
            middle = math.sqrt(low * high)
            in_time, rows = self._first(middle, share)
            all_in_time &= in_time
            if in_time and rows is None:
                low = middle
                continue
            high = middle
            if rows is not None:
                known = rows
                self._try(rows, low)
                high = min(high, self._ceiling())
        return low, high, known, all_in_time

    def _sample(self, low: float) -> None:
        """Try random allocations between the bound ``low`` and the best plan."""
        noise = np.random.default_rng(self.limits.seed)
        for share in SHARES:
            length = low + share * (min(self._ceiling(), self._longest) - low)
            if length > low and self._left() > (1 - _SAMPLING) * self.limits.seconds:
                _, rows = self._first(length, _TRIAL / 2, noise)
                if rows is not None:
                    self._try(rows, low)

    def _try(self, rows: Ints, least: float) -> None:
        """Look for a better pattern of an allocation for a short time."""
        stages = stages_of(self.question, rows)
        problem = self._problems.of(stages)
        low, high = period_bound(problem), problem.period_of(self._ceiling())
        if rows.tobytes() in self._proved or not low < high < math.inf:
            return
        self.solves += 1
        limits = replace(self.limits, seconds=min(self._left(), _TRYING * self.limits.seconds))
        found = _below(problem, low, high, limits)
        if found is not None and found.pattern is not None and found.pattern.period < high:
            self._offer(stages, found.pattern)
        if found is not None and found.done:
            self._proved[rows.tobytes()] = problem.iteration_seconds(found.bound)

    def _first(
        self, length: float, share: float, noise: np.random.Generator | None = None
    ) -> tuple[bool, Ints | None]:
        """An allocation that ``length`` does not refute; False if the time for it is up.

        ``share`` is the share of the time limit to use.
        """
        until = max(0.0, self._left() - share * self.limits.seconds)
        for _, rows in allocations(self.question.form, 0.0, length, 1, noise):
            if rows is not None:
                return True, rows
            if self._left() <= until:
                return False, None
        return True, None

    def _open(self, window: BoundWindow, least: float) -> None:
        """Push all allocations of the window and the next window; the window itself on timeout."""
        low, high = window.low, min(window.high, self._ceiling())
        for bound, rows in allocations(self.question.form, low, high):
            if rows is not None:
                self.allocations += 1
                self._push(bound, AllocationCandidate(rows))
            elif self._left() <= 0:
                self._push(least, window)
                return
        if high < self._longest:
            width = max(STEP * high, _WIDER * (high - least))
            self._push(high, BoundWindow(high, min(high + width, self._longest)))

    def _solve(self, candidate: AllocationCandidate, bound: float, attempt: int) -> None:
        """Solve the candidate's pattern, or prove that it is no better, with a time limit."""
        bound = max(bound, self._proved.get(candidate.rows.tobytes(), 0.0))
        if bound >= self._ceiling():
            self._close(bound)
            return
        stages = stages_of(self.question, candidate.rows)
        problem = self._problems.of(stages)
        seconds = self._seconds(attempt)
        limits = replace(self.limits, seconds=seconds)
        self.solves += 1
        low = max(pattern_load_bound(problem), problem.period_of(bound))
        high = problem.period_of(self.cost)
        found = PatternFound(None, low, True) if low >= high else _below(problem, low, high, limits)
        if found is None:
            answer = best_pattern(problem, limits, lower_seconds=low)
            found = PatternFound(answer.pattern, answer.bound, answer.status in DONE)
        bound = max(bound, problem.iteration_seconds(found.bound))
        if found.pattern is not None and found.pattern.period < high:
            self._offer(stages, found.pattern)
        if found.done:
            self._close(bound)
        else:
            self._push(bound, candidate, attempt + 1)

    def _offer(self, stages: tuple[Stage, ...], pattern: Pattern) -> None:
        """Check a plan, which is the best so far, and keep it."""
        problem = self._problems.of(stages)
        self.cost = problem.iteration_seconds(problem.evaluate(pattern))
        self.best = stages, pattern


def _below(problem: PatternProblem, low: float, high: float, limits: Limits) -> PatternFound | None:
    """The best pattern with a period above ``low`` and at most ``high``, if there is one.

    None if that cannot be decided: ``high`` is inf, or the pattern exceeds the memory within the
    solver's tolerance, or it is feasible only with all-reduces in the pause.
    """
    if high == math.inf:
        return None
    model = OrderModel(problem)
    rate = ByRate(replace(model, relaxed=True), low, high, problem.room_bytes)
    answer = solve(rate.apply(), "highs", limits)
    if answer.status is Status.INFEASIBLE:
        return PatternFound(None, high * (1 - SAFETY), True)
    bound = rate.period(answer.bound) * (1 - SAFETY)
    if answer.values is None:
        return PatternFound(None, bound, False)
    orders = rate.invert(answer.values)
    if model.overfull(orders):
        return None
    pattern = least_pattern(model, orders, low)
    if pattern is None:
        return None  # an all-reduce needs the pause
    return PatternFound(pattern, bound, answer.status is Status.OPTIMAL)


def stages_of(question: JointPatterns, rows: Ints) -> tuple[Stage, ...]:
    """The stages of an allocation, in the order of the layers."""
    placed = [row.tolist() for row in rows if row[0] >= 0]
    stops = [len(question.problem.chain), *(start for start, *_ in placed)]
    found = [
        question.stage(start, stop, group, mode)
        for (start, group, mode), stop in zip(placed, stops, strict=False)
    ]
    return tuple(found[::-1])


def _shortest_iteration(form: JointForm) -> float:
    """A lower bound: the average work per group of an iteration, including updates."""
    whole = form.ahead[-1]
    return float(form.microbatches * whole["work"] + whole["update"]) / len(form.groups)


def longest_iteration(form: JointForm) -> float:
    """An iteration long enough for every allocation to run microbatches one at a time."""
    layers = range(len(form.ahead) - 1)
    longest = {
        name: sum(_longest(form.stages[name][:, :, l, l + 1]) for l in layers)
        for name in ("work", "reduce", "update")
    }
    sends = form.links["there"] + form.links["back"]
    # The latency of an all-reduce counts once per stage, at most once per layer.
    period = longest["work"] + float(sends.max(axis=(0, 1)).sum()) + longest["reduce"]
    return form.microbatches * period + longest["update"]


def _longest(seconds: Floats) -> float:
    return float(seconds.max(initial=0.0, where=np.isfinite(seconds)))


def allocations(
    form: JointForm,
    low: float,
    high: float,
    batch: int = BATCH,
    noise: np.random.Generator | None = None,
) -> Iterator[tuple[float, Ints | None]]:
    """Yield the allocations that ``low`` refutes and ``high`` does not, with their bounds.

    ``noise`` changes their order. Yields None at intervals, so that the caller can check the time.
    """
    layers = len(form.ahead) - 1
    path = np.zeros(layers, dtype=ROW)
    found, bounds = np.empty((batch, layers, 3), dtype=np.int64), np.empty(batch)
    sums = np.zeros((layers + 1, len(form.groups) + 1, SUMS))
    sums[0, -1, FLIGHT] = 1.0
    rest, row = completion(form, high / form.microbatches, noise), 0
    while row >= 0:
        number, row = walk(form, rest, path, sums, row, low, high, STEPS, found, bounds)
        yield from ((float(bounds[i]), found[i].copy()) for i in range(number))
        if row >= 0:
            yield low, None
