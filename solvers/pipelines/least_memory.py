"""The least memory of all schedules that take at most a given makespan, and its bound.

The best cost for every limit of memory, and a bound for each.

A schedule within some memory keeps every larger limit, and a bound on the schedules within some
memory holds for every smaller limit: both are handed on.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from time import perf_counter

import numpy as np

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress, silent
from stagewright.formulations.pipelines.bounds.stages import schedule_bounds
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.formulations.schedules.timing import ONE_MICROBATCH
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.rows.search import RowSearch, compile_row_kernels
from stagewright.solvers.pipelines.scheduling import generated, is_small, solve_schedule

FIRST = 0.4  # share of the time for a first look at all limits, those of least memory first


@dataclass(frozen=True, slots=True, eq=False)
class CurvePoint:
    """The best cost known with a limit of ``memory`` on every device, and a bound on it."""

    memory: float
    timetable: Timetable
    cost: float
    bound: float
    proved_by: str
    source: str

    @property
    def gap(self) -> float:
        """(cost - bound) / cost; 0 within rounding."""
        exact = self.cost <= self.bound * (1 + RELATIVE_TOLERANCE)
        return 0.0 if exact else (self.cost - self.bound) / self.cost


def memory_curve(
    problem: MakespanProblem,
    limits_of_memory: Sequence[float],
    limits: Limits,
    on_points: Callable[[Sequence[CurvePoint]], None],
) -> list[CurvePoint]:
    """A point for each limit of memory, in rising order; ``on_points`` sees them improve.

    The time goes to all points in turn, then to those that are not proved, the largest gap first.
    """
    began = perf_counter()
    memories = sorted(set(limits_of_memory))
    points: list[CurvePoint] = []
    for k, memory in enumerate(memories):
        share = max(0.0, FIRST * limits.seconds - (perf_counter() - began)) / (len(memories) - k)
        known = points[-1].timetable if points else None
        points.append(_solved(problem, memory, known, replace(limits, seconds=share)))
        _hand_on(points)
        on_points(points)
    open_points = [k for k, point in enumerate(points) if point.gap > 0]
    while open_points and limits.left(perf_counter() - began) > 0:
        k = max(open_points, key=lambda k: points[k].gap)
        left = limits.left(perf_counter() - began) / len(open_points)
        open_points.remove(k)
        point = points[k]
        found = _solved(problem, point.memory, point.timetable, replace(limits, seconds=left))
        points[k] = _better(point, found)
        _hand_on(points)
        open_points = [k for k in open_points if points[k].gap > 0]
        on_points(points)
    return points


def _solved(
    problem: MakespanProblem, memory: float, known: Timetable | None, limits: Limits
) -> CurvePoint:
    limited = replace(problem, memory=(memory,) * len(problem.memory))
    result = solve_schedule(limited, "optimal", limits, incumbent=known)
    assert result.timetable is not None
    assert result.cost is not None
    return CurvePoint(
        memory, result.timetable, result.cost, result.bound, result.proved_by, result.source
    )


def _better(one: CurvePoint, other: CurvePoint) -> CurvePoint:
    """The better timetable and the better bound of two answers for the same memory."""
    best = min(one, other, key=lambda point: point.cost)
    proof = max(one, other, key=lambda point: point.bound)
    return replace(best, bound=min(best.cost, proof.bound), proved_by=proof.proved_by)


def _hand_on(points: list[CurvePoint]) -> None:
    """Pass schedules on to points with larger limits, and bounds to points with smaller limits."""
    for k in range(1, len(points)):
        before = points[k - 1]
        if before.cost < points[k].cost:
            points[k] = replace(
                points[k], timetable=before.timetable, cost=before.cost, source=before.source
            )
    for k in reversed(range(len(points) - 1)):
        after = points[k + 1]
        if after.bound > points[k].bound:
            points[k] = replace(points[k], bound=after.bound, proved_by=after.proved_by)


SEARCH = 0.5  # share of the time for schedules; the rest is for proofs that less is too slow
STEPS = 256  # limits that are told apart where amounts have no common unit
_MOST_LEVELS = 100_000


@dataclass(frozen=True, slots=True, eq=False)
class LeastMemory:
    """A timetable within the makespan, if one is found, that keeps to ``limit`` on all devices.

    ``bound`` is a lower bound on such limits, proved by ``proved_by``.
    """

    timetable: Timetable | None
    limit: float
    bound: float
    proved_by: str


@dataclass(frozen=True, slots=True, eq=False)
class MemoryLevels:
    """Limits of memory in rising order.

    ``exact``: memory in use is always one of them, else it can be between two.
    """

    limits: Floats
    exact: bool

    def bound(self, excluded: int) -> float:
        """A lower bound on memory in use if the first ``excluded`` limits are too small."""
        last = len(self.limits) - 1
        return float(self.limits[min(last, excluded if self.exact else max(0, excluded - 1))])


def least_memory(
    problem: MakespanProblem, most: float, limits: Limits, on_progress: OnProgress = silent
) -> LeastMemory:
    """The least limit of memory, the same for all devices, with a makespan of at most ``most``.

    Devices also keep to the problem's own limits. Without a schedule within those, the answer has
    no timetable. The bound is of all schedules with the problem's devices.
    """
    compile_row_kernels()
    search = _LeastMemorySearch(problem, most * (1 + RELATIVE_TOLERANCE), limits, on_progress)
    search.bisect()
    search.prove()
    levels = search.levels
    at = float(levels.limits[min(search.limit, len(levels.limits) - 1)])
    return LeastMemory(search.found, at, levels.bound(search.excluded), search.proof)


class _LeastMemorySearch:
    """The timetable of the least limit so far, and how many limits are excluded."""

    def __init__(
        self, problem: MakespanProblem, target: float, limits: Limits, on_progress: OnProgress
    ) -> None:
        self.problem, self.target, self.limits = problem, target, limits
        self.began, self.on_progress = perf_counter(), on_progress
        self.levels = memory_levels(problem)
        self.excluded, self.proof = _excluded(problem, self.levels, target)
        self.found: Timetable | None = None
        self.limit = len(self.levels.limits)

    def bisect(self) -> None:
        """Find schedules for a share of the time, with the most memory first."""
        search, low = replace(self.limits, seconds=SEARCH * self.limits.seconds), self.excluded
        while low < self.limit and (self.found is None or self._left(search) > 0):
            tried = self.limit - 1 if self.found is None else (low + self.limit) // 2
            share = replace(search, seconds=self._left(search) / 3)
            if not self._try(tried, share):
                if self.found is None:
                    break
                low = tried + 1

    def prove(self) -> None:
        """Solve for the next smaller limit until it has no schedule, while there is time."""
        while self.found is not None and self.excluded < self.limit:
            left = replace(self.limits, seconds=self._left(self.limits))
            if left.seconds <= 0:
                break
            known = self.excluded
            if not self._solve(self.limit - 1, left) and self.excluded == known:
                break

    def _left(self, limits: Limits) -> float:
        return limits.left(perf_counter() - self.began)

    def _try(self, tried: int, limits: Limits) -> bool:
        """Whether a schedule within a limit is found; small problems may also be excluded."""
        problem = within(self.problem, self.levels, tried)
        if is_small(problem):
            return self._solve(tried, limits)
        search = RowSearch(problem, limits.seed)
        search.first()
        for _, order in generated(problem):
            search.offer(order)
        search.run(self.target, limits)
        timetable = search.timetable()
        return problem.evaluate(timetable) <= self.target and self._take(tried, timetable)

    def _solve(self, tried: int, limits: Limits) -> bool:
        solved = solve_schedule(within(self.problem, self.levels, tried), "optimal", limits)
        assert solved.cost is not None
        assert solved.timetable is not None
        if solved.cost <= self.target:
            return self._take(tried, solved.timetable)
        if solved.bound > self.target:
            self.excluded, self.proof = max(self.excluded, tried + 1), solved.proved_by
        return False

    def _take(self, tried: int, timetable: Timetable) -> bool:
        self.found, self.limit = timetable, tried
        objective, bound = float(self.levels.limits[tried]), self.levels.bound(self.excluded)
        self.on_progress(Progress(perf_counter() - self.began, objective, bound))
        return True


def within(problem: MakespanProblem, levels: MemoryLevels, level: int) -> MakespanProblem:
    """The problem with the given limit on every device whose own limit is not smaller."""
    limit = float(levels.limits[level])
    return replace(problem, memory=tuple(min(limit, own) for own in problem.memory))


def memory_levels(problem: MakespanProblem) -> MemoryLevels:
    """The limits that differ, from one microbatch of all stages of a device to the problem's.

    Memory in use is a multiple of the greatest common divisor of all amounts. Where they have none,
    or a tiny one, limits are equally spaced.
    """
    ones = np.zeros(len(problem.memory))
    for home, amounts in zip(problem.device, problem.saved, strict=True):
        ones[home] += amounts[0]
    least = float(ones.max())
    most = float(np.minimum(problem.memory, problem.microbatches * ones).max())
    unit = _common_unit([amount for amounts in problem.saved for amount in amounts])
    if unit > 0 and (most - least) / unit < _MOST_LEVELS:
        count = math.floor((most - least) / unit + RELATIVE_TOLERANCE)
        return MemoryLevels(_equally_spaced(least, unit, count + 1), exact=True)
    if most <= least:
        return MemoryLevels(np.array([least]), exact=True)
    return MemoryLevels(_equally_spaced(least, (most - least) / (STEPS - 1), STEPS), exact=False)


def _equally_spaced(first: float, step: float, count: int) -> Floats:
    return np.array([first + step * k for k in range(count)])


def _common_unit(amounts: Sequence[float]) -> float:
    """The greatest common divisor of amounts that are ratios of small integers; 0: they are not."""
    largest = max(amounts)
    parts = [Fraction(amount / largest).limit_denominator(1000) for amount in amounts if largest]
    near = (
        math.isclose(part, amount / largest, rel_tol=RELATIVE_TOLERANCE)
        for part, amount in zip(parts, amounts, strict=False)
    )
    if largest == 0 or not all(near):
        return 0.0
    common = math.lcm(*(part.denominator for part in parts))
    return largest * math.gcd(*(int(part * common) for part in parts)) / common


def _excluded(problem: MakespanProblem, levels: MemoryLevels, target: float) -> tuple[int, str]:
    """How many limits the bounds of the makespan exclude, and the name of the best bound."""
    low, high, proof = 0, len(levels.limits), ONE_MICROBATCH
    while low < high:
        tried = (low + high) // 2
        best = _best(schedule_bounds(within(problem, levels, tried)))
        if best.seconds > target:
            low, proof = tried + 1, best.proved_by
        else:
            high = tried
    return low, proof


def _best(bounds: Sequence[Bound]) -> Bound:
    return max(bounds, key=lambda bound: bound.seconds)
