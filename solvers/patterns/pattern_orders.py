"""Orders of a makespan problem that repeat a steady pattern: schedules for many microbatches."""

from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.patterns.repetition import Repetition, RepetitionProblem
from stagewright.formulations.patterns.steady import steady_problem, unrolled
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.schedules.order import Order
from stagewright.solvers.patterns.repetition import LENGTHS, best_repetition, solve_at
from stagewright.solvers.patterns.repetition_model import AtPeriod, common_scale

PERIODS = (1.0, 1.02, 1.05, 1.1)  # times the least period: a longer one may have shorter ends
TICKS = 200  # of a period, where times have no common unit
SHARE = 0.5  # of the time, for the least period; the rest is for the ends


def pattern_orders(
    problem: MakespanProblem, limits: Limits, lengths: tuple[int, ...] = LENGTHS
) -> Iterator[tuple[str, Order]]:
    """Name and order of schedules that repeat a pattern, the one of least period first.

    Then patterns of the same and of longer periods in which a microbatch passes all stages as
    quickly as possible: with few microbatches a short warm-up and drain count more than the period.
    The orders keep the problem's memory and in-flight limits. They are better the more microbatches
    there are; none is known to be optimal, since the bound on the period bounds repetitions, not
    the makespan. Nothing is yielded if a computation takes no time, or if no pattern is found.

    ``lengths``: the numbers of microbatches of a period, see `best_repetition`.
    """
    if min(*problem.forward, *problem.backward, *problem.last_computation) <= 0:
        return
    began = perf_counter()
    steady = steady_problem(problem)
    lengths = tuple(length for length in lengths if length <= problem.microbatches)
    found = best_repetition(steady, replace(limits, seconds=SHARE * limits.seconds), lengths)
    if found.repetition is None or found.pace is None:
        return
    yield f"pattern of {found.repetition.length}", unrolled(problem, found.repetition)
    for number, longer in enumerate(PERIODS):
        left = limits.left(perf_counter() - began) / (len(PERIODS) - number)
        quick = _quickest(steady, found.pace * longer, replace(limits, seconds=left))
        if quick is not None:
            yield f"quick pattern, {longer:g} of the least period", unrolled(problem, quick)


def _quickest(problem: RepetitionProblem, period: float, limits: Limits) -> Repetition | None:
    """A repetition of one microbatch in about ``period``, from first start to last end soonest."""
    scale = common_scale(problem.seconds)
    unit = period / TICKS if scale is None else max(1 / scale, period / TICKS)
    unit = min(unit, min(problem.seconds))
    ticks = -int(-period * (1 - 1e-12) // unit)
    _, found = solve_at(AtPeriod(problem, 1, ticks, unit, cautious=True), limits, shortest=True)
    return found
