"""1F1B without flush: the first microbatches of a periodic pattern (PipeDream, MadPipe's 1F1B*)."""

import math

from stagewright.formulations.patterns.one_f_one_b import least_period, one_f_one_b_star
from stagewright.formulations.patterns.pattern import PatternProblem
from stagewright.formulations.plans.actions import COMPUTE, Action, along_way
from stagewright.formulations.schedules.order import Order
from stagewright.graphs.documents.errors import InputError


def without_flush(problem: PatternProblem, microbatches: int) -> Order:
    """The order of 1F1B* at its least period; every stage has its own device.

    Equal stages without transfers get the order of `one_f_one_b`: the two differ in when weights
    change, not in the order.

    Raises
    ------
    InputError
        If memory allows no period.
    """
    period = least_period(problem)
    if math.isinf(period):
        raise InputError("1F1B without flush does not fit in memory at any period")
    pattern = one_f_one_b_star(problem, period)
    timed: list[list[tuple[float, int, tuple[int, int], Action]]] = [[] for _ in problem.forward]
    for job, start in zip(problem.jobs, pattern.starts, strict=True):
        if job.operation.kind in COMPUTE:
            for m in range(microbatches):
                action = job.operation.of(m)
                timed[action.stage].append((start + m * period, m, along_way(action), action))
    for row in timed:
        row.sort(key=lambda entry: entry[:3])
    return Order(tuple(tuple(action for *_, action in row) for row in timed))
