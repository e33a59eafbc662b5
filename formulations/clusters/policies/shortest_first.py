"""Shortest job first (thesis 5.4.2): the job that can be done soonest is done as soon as it can.

    minimise_X  min_m  num_steps_m / throughput(m, X)

No job is done sooner than at its fastest all of the time, and the shortest one can be. That leaves
the others free: they are served like first in, first out (``fifo``), in order of their shortest
durations instead of their arrival.

Jobs that choose among counts have the two passes of ``fifo`` in that order, the shortest too: at
its fastest it would hold accelerators that do more for those behind it. The objective is then the
sum over jobs of their rank, most for the shortest, times throughput relative to the fastest.
"""

import numpy as np

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, throughput
from stagewright.graphs.documents.arrays import Floats


def _shortest_seconds(problem: AllocationProblem) -> Floats:
    """Seconds of each job alone on its fastest type all of the time, shape (jobs,)."""
    return np.asarray(problem.steps / problem.rates.max(axis=1))


def least_seconds(problem: AllocationProblem) -> Floats:
    """Least seconds of each job in any allocation: alone or in its fastest pair, shape (jobs,)."""
    return np.asarray(problem.steps / problem.best_rates())


def objective(problem: AllocationProblem, allocation: Allocation) -> float:
    """Seconds until the first job is done."""
    with np.errstate(divide="ignore"):
        return float((problem.steps / throughput(problem, allocation)).min())


def values(problem: AllocationProblem) -> Floats:
    """Value in the second objective of a step per second of each job: M for the shortest."""
    order = np.argsort(_shortest_seconds(problem), kind="stable")
    rank = np.empty(len(problem))
    rank[order] = np.arange(len(problem), 0, -1)
    return np.asarray(rank / problem.rates.max(axis=1))


def floor(problem: AllocationProblem) -> Floats:
    """Steps per second that the shortest job must have; 0 for the others."""
    shortest = int(_shortest_seconds(problem).argmin())
    least = np.zeros(len(problem))
    least[shortest] = (problem.rates * problem.kept)[shortest].max()
    return least
