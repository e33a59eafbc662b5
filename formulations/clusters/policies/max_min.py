"""Max-min fairness, least attained service (thesis 5.4.1).

maximise_X  min_m  scale_factor_m / w_m * throughput(m, X) / throughput(m, X_m^equal)
"""

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, throughput
from stagewright.graphs.documents.arrays import Floats


def needs(problem: AllocationProblem) -> Floats:
    """The throughput at which each job's normalised throughput is 1, steps per second."""
    return problem.weight * problem.fair_throughput()


def objective(problem: AllocationProblem, allocation: Allocation) -> float:
    """The least normalised throughput."""
    return float((throughput(problem, allocation) / needs(problem)).min())
