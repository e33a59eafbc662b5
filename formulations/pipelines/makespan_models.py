"""The makespan problem as ``Intervals`` and as a mixed-integer program.

Microbatches are alike, so the models fix their order in every block; the argument stands in
:mod:`makespan`. In-flight limits become precedences: forward m + k of a
stage waits for the end of its backward m.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from stagewright.formulations.forms.disjunctive import by_disjunctions, starts_of
from stagewright.formulations.forms.models import Intervals, LinearProgram
from stagewright.formulations.pipelines.bounds import blocks_of, schedule_bounds
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.graphs.documents.arrays import Floats, Ints

TICKS = 24  # log2 of the horizon for times without a common unit; far finer ticks slow the proofs
MAX_TICKS = 2**40  # times with a common unit are taken exactly up to this horizon
MAX_DENOMINATOR = 10_000  # of a time as a fraction of the least
EXACT = 1e-12  # relative error of a time that still counts as a multiple of the unit

CP_SAT = "CP-SAT"


@dataclass(frozen=True)
class ByIntervals:
    """One interval per block and microbatch: number ``block * M + m``.

    Blocks are numbered as in :func:`blocks_of`. Times that are
    multiples of a common unit are taken exactly: ties that rounding would break make the search
    much harder. Others are rounded down, so that a bound on the form, in units, is always a bound
    on the problem. ``incumbent``, a feasible timetable, gives the hint and the horizon.
    """

    problem: MakespanProblem
    incumbent: Timetable

    @cached_property
    def unit(self) -> float:
        """Time per tick: 1 for integers, else the common unit, else a power of two."""
        horizon = self.incumbent.makespan(self.problem)
        durations, _, tails = blocks_of(self.problem)
        times = np.unique(np.r_[durations, tails])
        times = times[times > 0]
        if len(times) == 0:
            return 1.0
        for unit in (1.0, _common_unit(times)):
            if horizon <= MAX_TICKS * unit and _are_multiples(times, unit):
                return unit
        return math.ldexp(1.0, math.frexp(horizon)[1] - TICKS)

    @cached_property
    def ticks(self) -> MakespanProblem:
        """The problem in ticks."""

        def count(times: tuple[float, ...]) -> tuple[float, ...]:
            ticks = np.array(times) / self.unit
            nearest = np.round(ticks)
            multiple = np.abs(ticks - nearest) <= EXACT * nearest
            return tuple(np.where(multiple, nearest, np.floor(ticks)).tolist())

        problem = self.problem
        return MakespanProblem(
            problem.microbatches,
            count(problem.forward),
            count(problem.backward),
            count(problem.send_forward),
            count(problem.send_backward),
            count(problem.reduce),
            problem.in_flight,
        )

    def apply(self) -> Intervals:
        """The form, with the best static bound and the incumbent's order as the hint."""
        count = self.problem.microbatches
        durations, _, tails = blocks_of(self.ticks)
        number = np.arange(len(durations) * count).reshape(-1, count)
        last_tails = np.zeros(number.shape, dtype=np.int64)
        last_tails[:, -1] = tails  # the other microbatches of a block end earlier
        hint = earliest(self.ticks, block_starts(self.problem, self.incumbent))
        return Intervals(
            durations=np.repeat(durations, count).astype(np.int64),
            machines=_machines(durations, number),
            before=_precedences(self.ticks, number),
            tails=last_tails.ravel(),
            horizon=int(hint.makespan(self.ticks)),
            lower_bound=int(max(bound.seconds for bound in schedule_bounds(self.ticks))),
            hint=block_starts(self.ticks, hint).ravel().astype(np.int64),
        )

    def invert(self, values: Ints) -> Timetable:
        """The order of ``values`` with its earliest times, in the problem's own numbers."""
        starts = values.reshape(-1, self.problem.microbatches).astype(float)
        return earliest(self.problem, starts, block_durations=blocks_of(self.ticks)[0])


@dataclass(frozen=True)
class ByDisjunctions:
    """The same model as a mixed-integer program, for small cases."""

    problem: MakespanProblem
    incumbent: Timetable

    @cached_property
    def intervals(self) -> ByIntervals:
        """The formulation whose disjunctions these are."""
        return ByIntervals(self.problem, self.incumbent)

    def apply(self) -> LinearProgram:
        """The form; its objective counts the ticks of ``intervals``."""
        return by_disjunctions(self.intervals.apply())

    def invert(self, values: Floats) -> Timetable:
        """The order of ``values`` with its earliest times, in the problem's own numbers."""
        count = (4 * self.problem.stages - 2) * self.problem.microbatches
        return self.intervals.invert(starts_of(values, count))


def block_starts(problem: MakespanProblem, times: Timetable) -> Floats:
    """The start times by block, shape (4S - 2, M), microbatches in the order of their starts."""
    last = 4 * problem.stages - 3
    starts = np.empty((last + 1, problem.microbatches))
    stage = np.arange(problem.stages)
    starts[2 * stage], starts[last - 2 * stage] = times.forward, times.backward
    starts[2 * stage[:-1] + 1] = times.send_forward
    starts[last - 1 - 2 * stage[:-1]] = times.send_backward
    return np.sort(starts, axis=1)


def timetable_of(problem: MakespanProblem, starts: Floats) -> Timetable:
    """The timetable of start times by block; all-reduces start when their last backward ends."""
    last = 4 * problem.stages - 3
    stage = np.arange(problem.stages)
    backward = starts[last - 2 * stage]
    return Timetable(
        starts[2 * stage],
        backward,
        starts[2 * stage[:-1] + 1],
        starts[last - 1 - 2 * stage[:-1]],
        backward[:, -1] + np.array(problem.backward),
    )


def earliest(
    problem: MakespanProblem, starts: Floats, block_durations: Floats | None = None
) -> Timetable:
    """Keep the order of ``starts`` (blocks, M) on every device and channel; start all at once.

    ``block_durations`` are the durations that belong to ``starts``, if not the problem's own.
    """
    durations = blocks_of(problem)[0]
    last, count = len(durations) - 1, problem.microbatches
    finish = starts + (durations if block_durations is None else block_durations)[:, None]
    block, m = np.divmod(np.arange(starts.size), count)
    # An order of dependence: an empty block stands before what starts with it.
    order = np.lexsort((block, m, finish.ravel(), starts.ravel()))
    times, free, work = np.zeros(starts.shape), [0.0] * (last // 2 + 1), durations.tolist()
    for j, i in zip(block[order].tolist(), m[order].tolist(), strict=True):
        machine = min(j, last - j)
        start = free[machine]
        if j > 0:
            start = max(start, times[j - 1, i] + work[j - 1])
        if j == machine and j % 2 == 0 and i >= problem.in_flight[j // 2]:
            freeing = times[last - j, i - problem.in_flight[j // 2]] + work[last - j]
            start = max(start, freeing)
        times[j, i] = start
        if work[j] > 0 or work[last - j] > 0:
            free[machine] = start + work[j]
    return timetable_of(problem, times)


def _common_unit(times: Floats) -> float:
    """The largest unit of which all ``times`` seem to be multiples, judged by their ratios."""
    least = float(times.min())
    ratios = [Fraction(time / least).limit_denominator(MAX_DENOMINATOR) for time in times.tolist()]
    return least / math.lcm(*(ratio.denominator for ratio in ratios))


def _are_multiples(times: Floats, unit: float) -> bool:
    ticks = times / unit
    return bool((np.abs(ticks - np.round(ticks)) <= EXACT * ticks).all())


def _machines(durations: Floats, number: Ints) -> tuple[Ints, ...]:
    """The intervals of each device and channel; one without any work excludes nothing."""
    last = len(durations) - 1
    return tuple(
        number[[there, last - there]].ravel()
        for there in range(last // 2 + 1)
        if durations[there] > 0 or durations[last - there] > 0
    )


def _precedences(problem: MakespanProblem, number: Ints) -> Ints:
    """Rows (before, after): along each microbatch, along each block, and in-flight slots."""
    last = len(number) - 1
    rows = [
        np.column_stack([number[:-1].ravel(), number[1:].ravel()]),
        np.column_stack([number[:, :-1].ravel(), number[:, 1:].ravel()]),
    ]
    for s, limit in enumerate(problem.in_flight):
        if limit < problem.microbatches:
            rows.append(np.column_stack([number[last - 2 * s, :-limit], number[2 * s, limit:]]))
    return np.concatenate(rows)
