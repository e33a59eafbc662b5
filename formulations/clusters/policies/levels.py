"""The linear program behind the policies that raise the worst-off job: max theta.

    maximise theta  such that  throughput(m, X) >= theta * need_m  for every job m

Max-min fairness needs a job's fair throughput, makespan its steps (theta = 1 / T, thesis 5.4.2).
"""

from dataclasses import dataclass

import numpy as np
from scipy import sparse

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

    Parameters
    ----------
    need
        Of a group: the sum over its jobs, steps per second, positive, shape (groups,). The jobs
        divide it in proportion to their shares.
    most
        A level that no allocation exceeds.
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
