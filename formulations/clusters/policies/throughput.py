"""Maximum total throughput (thesis 6.4.1), the baseline that policies with costs build on.

maximise_X  sum_m  throughput(m, X) / throughput(m, X_m^fastest)

The thesis sums raw steps per second, which weighs a step of one model against a step of another;
here a job counts by the part of its best rate that it gets.
"""

import numpy as np

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, throughput
from stagewright.formulations.clusters.polytope import Polytope
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.arrays import Floats


def fastest(problem: AllocationProblem) -> Floats:
    """Steps per second of each kind alone where it is fastest, shape (kinds,)."""
    return np.asarray(problem.table.alone.max(axis=1))


def objective(problem: AllocationProblem, allocation: Allocation) -> float:
    """Total normalised throughput: n jobs that all run at their best have n."""
    return float((throughput(problem, allocation) / fastest(problem)[problem.kind]).sum())


def throughput_program(valid: Polytope) -> LinearProgram:
    """Minimise the negated total; like jobs count alike, so that groups by kind lose nothing."""
    worth = 1 / fastest(valid.problem)[valid.groups.kind]
    return LinearProgram(
        -(valid.rate.T @ worth),
        valid.matrix,
        valid.lower,
        valid.upper,
        np.zeros(valid.columns),
        valid.most,
        np.zeros(valid.columns, dtype=bool),
    )
