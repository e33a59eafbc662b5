"""Maximum total throughput (thesis 6.4.1), the baseline that policies with costs build on.

maximise_X  sum_m  throughput(m, X) / throughput(m, X_m^fastest)

The thesis sums raw steps per second, which weighs a step of one model against a step of another;
here a job counts by the part of its best rate that it gets.

The linear program behind the policies that raise the worst-off job: max theta.

    maximise theta  such that  throughput(m, X) >= theta * need_m  for every job m

Max-min fairness needs a job's fair throughput, makespan its steps (theta = 1 / T, thesis 5.4.2).
"""

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, throughput
from stagewright.formulations.clusters.polytope import Polytope
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.arrays import Floats


@dataclass(frozen=True, slots=True, eq=False)
class LevelProgram:
    """The form, minimising -theta / ``unit``, and the same with groups' time relaxed.

    The last column is theta / ``unit``, from 0 to 1: solvers' tolerances are absolute.
    """

    form: LinearProgram
    relaxed: LinearProgram
    unit: float


def level_program(valid: Polytope, need: Floats, most: float) -> LevelProgram:
    """State the program for the polytope's groups.

    ``need``: of a group: the sum over its jobs, steps per second, positive, shape (groups,). The
    jobs divide it in proportion to their shares. ``most``: A level that no allocation exceeds.
    """
    columns, groups = valid.columns, len(need)
    matrix = _with_levels(valid, 1.0 / (need * most))
    cost = np.zeros(columns + 1)
    cost[-1] = -1.0

    def form(upper: Floats) -> LinearProgram:
        return LinearProgram(
            cost,
            matrix,
            np.concatenate([valid.lower, np.zeros(groups)]),
            np.concatenate([upper, np.full(groups, np.inf)]),
            np.zeros(columns + 1),
            np.append(valid.most, 1.0),
            np.zeros(columns + 1, dtype=bool),
        )

    return LevelProgram(form(valid.upper), form(valid.relaxed_upper()), most)


def _with_levels(valid: Polytope, scale: Floats) -> sparse.csr_array:
    """The polytope's rows, and below them scale * rate @ y - theta, put together at once."""
    above, rate = valid.matrix.tocoo(), valid.rate.tocoo()
    first, groups = valid.matrix.shape[0], len(scale)
    levels = np.arange(groups)
    rows = np.concatenate([above.row, first + rate.row, first + levels])
    columns = np.concatenate([above.col, rate.col, np.full(groups, valid.columns)])
    values = np.concatenate([above.data, rate.data * scale[rate.row], np.full(groups, -1.0)])
    shape = (first + groups, valid.columns + 1)
    return sparse.csr_array(sparse.coo_array((values, (rows, columns)), shape=shape))


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
