"""The best cost for every limit of memory, and a bound for each.

A schedule within some memory keeps every larger limit, and a bound on the schedules within some
memory holds for every smaller limit: both are handed on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.solvers.pipelines.scheduling import solve_schedule

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
