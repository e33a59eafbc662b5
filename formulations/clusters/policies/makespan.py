"""Minimum makespan (thesis 5.4.2): all active jobs are done as early as possible.

minimise_X  max_m  num_steps_m / throughput(m, X)
"""

import numpy as np

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, throughput


def objective(problem: AllocationProblem, allocation: Allocation) -> float:
    """Seconds until the last job is done; inf if a job makes no progress."""
    with np.errstate(divide="ignore"):
        return float((problem.steps / throughput(problem, allocation)).max())
