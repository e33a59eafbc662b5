"""The least memory of all schedules that take at most a given makespan, and its bound."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from time import perf_counter

import numpy as np

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress, silent
from stagewright.formulations.pipelines.bounds import schedule_bounds
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.generated import generated
from stagewright.solvers.pipelines.row_search import RowSearch, compile_row_kernels
from stagewright.solvers.pipelines.scheduling import is_small, solve_schedule

ONE_MICROBATCH = "one microbatch of every stage"
SEARCH = 0.5  # share of the time for schedules; the rest is for proofs that less is too slow
STEPS = 256  # limits that are told apart where amounts have no common unit
MOST_LEVELS = 100_000


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
class Levels:
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
    began = perf_counter()
    compile_row_kernels()
    levels, target = memory_levels(problem), most * (1 + RELATIVE_TOLERANCE)
    excluded, proof = _excluded(problem, levels, target)
    search = replace(limits, seconds=SEARCH * limits.seconds)
    found, limit, low = None, len(levels.limits), excluded
    while low < limit and (found is None or search.left(perf_counter() - began) > 0):
        # The most memory first: without a schedule there, there is no answer.
        tried = limit - 1 if found is None else (low + limit) // 2
        left = replace(search, seconds=search.left(perf_counter() - began) / 3)
        timetable, name = _searched(within(problem, levels, tried), target, left)
        if name is not None:
            excluded, proof = max(excluded, tried + 1), name
        if timetable is None and found is None:
            break
        if timetable is None:
            low = tried + 1
            continue
        found, limit = timetable, tried
        seconds = perf_counter() - began
        on_progress(Progress(seconds, float(levels.limits[limit]), levels.bound(excluded)))
    while excluded < limit:
        left = replace(limits, seconds=limits.left(perf_counter() - began))
        if left.seconds <= 0:
            break
        result = solve_schedule(within(problem, levels, limit - 1), "optimal", left)
        assert result.cost is not None
        if result.cost <= target:
            found, limit = result.timetable, limit - 1
        elif result.bound > target:
            excluded, proof = limit, result.proved_by
        else:
            break
        seconds = perf_counter() - began
        on_progress(Progress(seconds, float(levels.limits[limit]), levels.bound(excluded)))
    at = float(levels.limits[min(limit, len(levels.limits) - 1)])
    return LeastMemory(found, at, levels.bound(excluded), proof)


def within(problem: MakespanProblem, levels: Levels, level: int) -> MakespanProblem:
    """The problem with that limit on every device, or its own where that is less."""
    limit = float(levels.limits[level])
    return replace(problem, memory=tuple(min(limit, own) for own in problem.memory))


def memory_levels(problem: MakespanProblem) -> Levels:
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
    if unit > 0 and (most - least) / unit < MOST_LEVELS:
        count = math.floor((most - least) / unit + RELATIVE_TOLERANCE)
        return Levels(_equally_spaced(least, unit, count + 1), exact=True)
    if most <= least:
        return Levels(np.array([least]), exact=True)
    return Levels(_equally_spaced(least, (most - least) / (STEPS - 1), STEPS), exact=False)


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


def _excluded(problem: MakespanProblem, levels: Levels, target: float) -> tuple[int, str]:
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


def _searched(
    problem: MakespanProblem, target: float, limits: Limits
) -> tuple[Timetable | None, str | None]:
    """A timetable with at most the makespan ``target``, or what proves that there is none."""
    if is_small(problem):
        solved = solve_schedule(problem, "optimal", limits)
        assert solved.cost is not None
        if solved.cost <= target:
            return solved.timetable, None
        return None, solved.proved_by if solved.bound > target else None
    search = RowSearch(problem, limits.seed)
    search.first()
    for _, order in generated(problem):
        search.offer(order)
    search.run(target, limits)
    timetable = search.timetable()
    return (timetable if problem.evaluate(timetable) <= target else None), None
