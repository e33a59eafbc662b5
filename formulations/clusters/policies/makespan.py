"""Minimum makespan (thesis 5.4.2): all active jobs are done as early as possible.

    minimise_X  max_m  num_steps_m / throughput(m, X)

One X for all of the makespan T lets all jobs end at T: where the cluster is crowded, the optimum
leaves no other. But accelerators may serve one job after the other. Where jobs choose among counts,
which makes them fill every cluster, a second stage divides X in a first part d of the time and the
rest, X = d X1 + (1 - d) X2, both valid, and lets as much as possible end early:

    maximise_X1,X2  sum_m  throughput(m, X1) * T / num_steps_m
    such that  throughput(m, X) >= num_steps_m / T,  d * throughput(m, X1) <= num_steps_m / T

X has the makespan T still. X1 runs until a job ends, when all is asked again: d is not less than
that takes, for a job that has to run all but a little of T could be left out for so long only.
"""

import numpy as np
from scipy import sparse

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, throughput
from stagewright.formulations.clusters.polytope import Polytope
from stagewright.formulations.forms.models import LinearProgram

FIRST = 0.01
"""The least part d: shorter than the time to most jobs' ends."""
ROUNDING = 1e-9  # of a job's steps


def objective(problem: AllocationProblem, allocation: Allocation) -> float:
    """Seconds until the last job is done; inf if a job makes no progress."""
    with np.errstate(divide="ignore"):
        return float((problem.steps / throughput(problem, allocation)).max())


def early_ends(valid: Polytope, makespan: float, first: float) -> LinearProgram:
    """The second stage over (X1, X2) of the polytope's groups, minimising the negated sum.

    ``first`` is d, between 0 and 1.
    """
    groups, columns = len(valid.groups), valid.columns
    done = sparse.diags_array(makespan / valid.groups.total(valid.problem.steps)) @ valid.rate
    rows = sparse.block_array(
        [
            [valid.matrix, None],
            [None, valid.matrix],
            [first * done, (1 - first) * done],
            [first * done, None],
        ],
        format="csr",
    )
    return LinearProgram(
        np.concatenate([-(done.T @ valid.groups.size), np.zeros(columns)]),
        sparse.csr_array(rows),
        np.concatenate(
            [valid.lower, valid.lower, np.full(groups, 1 - ROUNDING), np.full(groups, -np.inf)]
        ),
        np.concatenate([valid.upper, valid.upper, np.full(groups, np.inf), np.ones(groups)]),
        np.zeros(2 * columns),
        np.concatenate([valid.most, valid.most]),
        np.zeros(2 * columns, dtype=bool),
    )
