"""Finish-time fairness (thesis 5.4.2, after Themis): completion relative to 1/n of the cluster.

    minimise_X  max_m  rho_m,
    rho_m = (t_m + num_steps_m / throughput(m, X))
            / (t_m^isolated + num_steps_m / throughput(m, X^isolated))

The weights of jobs do not count. With D_m for the denominator, rho is within reach exactly if some
X gives every job ``num_steps_m / (rho * D_m - t_m)`` steps per second, a set of linear rows.
"""

import numpy as np

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, throughput
from stagewright.graphs.documents.arrays import Floats


def isolated_finish(problem: AllocationProblem) -> Floats:
    """D_m: seconds from a job's arrival to its end on 1/n of the cluster, shape (jobs,)."""
    isolated = problem.isolated_throughput()
    return np.asarray(problem.isolated_seconds + problem.steps / isolated)


def needs(problem: AllocationProblem, rho: float) -> Floats:
    """Steps per second with which each job ends after ``rho`` times its isolated time."""
    return np.asarray(problem.steps / (rho * isolated_finish(problem) - problem.elapsed_seconds))


def ratios(problem: AllocationProblem, rates: Floats) -> Floats:
    """Each job's rho at ``rates`` steps per second; inf for a job without progress."""
    with np.errstate(divide="ignore"):
        finish = problem.elapsed_seconds + problem.steps / rates
    return np.asarray(finish / isolated_finish(problem))


def objective(problem: AllocationProblem, allocation: Allocation) -> float:
    """The largest rho."""
    return float(ratios(problem, throughput(problem, allocation)).max())


def least_beyond(problem: AllocationProblem, rho: float, level: float) -> float:
    """A lower bound on the worst ratio, if ``level`` is the max-min throughput at ratio ``rho``.

    If no allocation gives every job more than ``level`` times its need at ``rho``, none reaches a
    ratio at which all jobs need more than that.
    """
    late = problem.elapsed_seconds / isolated_finish(problem)
    return float((late + (rho - late) / level).min())
