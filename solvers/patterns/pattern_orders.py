"""Orders of a makespan problem that repeat a steady pattern: schedules for many microbatches."""

import math
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.patterns.repetition import Repetition, RepetitionProblem
from stagewright.formulations.patterns.steady import steady_problem, unrolled
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.schedules.order import Order
from stagewright.solvers.patterns.repetition import best_repetition, solve_at
from stagewright.solvers.patterns.repetition_model import MARGIN, AtPeriod, common_scale

LENGTHS = (1, 2)
FINE = 2**16  # ticks of a period, where times have no common unit
SHARE = 0.6  # of the time, for the least period; the rest is for the ends


def pattern_orders(
    problem: MakespanProblem, limits: Limits, lengths: tuple[int, ...] = LENGTHS
) -> Iterator[tuple[str, Order]]:
    """Name and order of schedules that repeat a pattern, the one of least period first.

    Then one of the same period whose microbatches pass all stages as quickly as possible, for a
    short warm-up and drain. The search of rows may improve both ends of either.

    The orders keep the problem's memory and in-flight limits. None is known to be optimal: the
    bound on the period is one on repetitions, not on the makespan. Nothing is yielded if a
    computation takes no time, or if no pattern is found.

    ``lengths``: the numbers of microbatches of a period, see `best_repetition`.
    """
    if min(*problem.forward, *problem.backward, *problem.last_computation) <= 0:
        return
    began = perf_counter()
    steady = steady_problem(problem)
    lengths = tuple(length for length in lengths if length <= problem.microbatches)
    found = best_repetition(steady, replace(limits, seconds=SHARE * limits.seconds), lengths)
    if found.repetition is None:
        return
    yield f"pattern of {found.repetition.length}", unrolled(problem, found.repetition)
    left = replace(limits, seconds=limits.left(perf_counter() - began))
    quick = _quickest(steady, found.repetition, left)
    if quick is not None:
        yield f"quick pattern of {quick.length}", unrolled(problem, quick)


def _quickest(problem: RepetitionProblem, known: Repetition, limits: Limits) -> Repetition | None:
    """A repetition with the period of ``known`` and the least time from first start to last end."""
    scale = common_scale(problem.seconds)
    unit = min(*problem.seconds, known.period / FINE) if scale is None else 1 / scale
    ticks = math.ceil(known.period / unit * (1 - MARGIN))
    form = AtPeriod(problem, known.length, ticks, unit)
    _, found = solve_at(form, limits, shortest=known)
    return found if found is not None and problem.fits(found) else None
