"""The least period for given orders, and the sequential pattern."""

import numpy as np

from stagewright.formulations.patterns.order_model import MARGIN, OrderModel
from stagewright.formulations.patterns.pattern import Pattern, PatternProblem
from stagewright.graphs.documents.arrays import Floats, Ints


def sequential(problem: PatternProblem) -> Pattern:
    """One microbatch at a time: no pattern needs less memory, at any period.

    When a backward starts, every earlier stage on its device keeps that microbatch; here they keep
    no other.
    """
    starts = np.concatenate([[0.0], np.cumsum([job.seconds for job in problem.jobs])])
    period = max(float(starts[-1]), _period_floor(problem))
    return Pattern(period, tuple(starts[:-1].tolist()))


def _period_floor(problem: PatternProblem) -> float:
    """A lower bound on the period from all-reduces and offloading, for any orders."""
    reduced = (sum(problem.reduce[s] for s in stages) for stages in problem.reducing)
    return max(problem.least_seconds, max(reduced) / problem.microbatches)


def least_pattern(model: OrderModel, orders: Ints, least: float = 0.0) -> Pattern | None:
    """The least period of at least ``least`` for ``orders``, with the earliest starts.

    None if the orders are infeasible at every period.
    """
    differences = model.differences
    found = _least_period_of(
        before=np.array([one.before for one in differences]),
        after=np.array([one.after for one in differences]),
        seconds=np.array([one.seconds for one in differences]),
        periods=-np.array([one.periods.at(orders) for one in differences], dtype=float),
        least=max(least, _period_floor(model.problem)),
        slack=MARGIN * sum(job.seconds for job in model.problem.jobs),
    )
    return None if found is None else model.pattern(found[0], found[1].tolist())


def _least_period_of(
    before: Ints, after: Ints, seconds: Floats, periods: Floats, least: float, slack: float
) -> tuple[float, Floats] | None:
    """The least T of at least ``least`` with start[after] >= start[before] + seconds - periods T.

    Returns T and the earliest starts, counted from that of job 0, which must precede all others.

    The period is the maximum ratio of seconds to periods over all cycles of differences. If a
    period is infeasible, the ratio of a violated cycle is the next candidate (Lawler; Dasdan 2004).
    A candidate is never above the optimum, and there are finitely many.

    None if no period is feasible.
    """
    period = least
    while True:
        starts, cycle = _longest(before, after, seconds - periods * period, slack)
        if not cycle:
            return period, starts
        if periods[cycle].sum() <= 0:
            return None
        period = float(seconds[cycle].sum() / periods[cycle].sum())


def _longest(before: Ints, after: Ints, weights: Floats, slack: float) -> tuple[Floats, list[int]]:
    """Longest paths from job 0 (Bellman-Ford), or the arcs of a cycle of positive length."""
    jobs = int(after.max(initial=0)) + 1
    starts, parent = np.full(jobs, -np.inf), np.full(jobs, -1)
    starts[0] = 0.0
    while True:
        reached = starts[before] + weights
        order = np.argsort(reached, kind="stable")
        last = np.full(jobs, -1)
        last[after[order]] = order  # the longest is written last
        longer = (last >= 0) & (reached[last] > starts + slack)
        if not longer.any():
            return starts, []
        starts[longer], parent[longer] = reached[last[longer]], last[longer]
        cycle = _cycle(before.tolist(), parent.tolist())
        if cycle:
            return starts, cycle


def _cycle(before: list[int], parent: list[int]) -> list[int]:
    """The arcs of a cycle of parents; empty if there is none."""
    done: set[int] = set()
    for root in range(len(parent)):
        job, place = root, dict[int, int]()
        path: list[int] = []
        while parent[job] >= 0 and job not in done:
            if job in place:
                return path[place[job] :]
            place[job] = len(path)
            path.append(parent[job])
            job = before[parent[job]]
        done.update(place)
    return []
