"""The linear program behind the policies that raise the worst-off job: max theta.

    maximise theta  such that  throughput(m, X) >= floor_m + theta * need_m  for every job m

Max-min fairness needs a job's fair throughput, makespan its steps (theta = 1 / T, thesis 5.4.2).
"""

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from stagewright.formulations.forms import Floats, LinearProgram
from stagewright.formulations.polytope import Polytope


@dataclass(frozen=True, slots=True, eq=False)
class LevelProgram:
    """The form, minimising -theta, and the same with groups' time relaxed, for the bound."""

    form: LinearProgram
    relaxed: LinearProgram


def level_program(valid: Polytope, need: Floats, floor: Floats, most: float) -> LevelProgram:
    """State the program for the polytope's groups.

    Parameters
    ----------
    need, floor
        Of a group: the sum over its jobs, steps per second, shape (groups,). Jobs of a group
        divide need and floor in proportion to their shares.
    most
        A level that no allocation exceeds.
    """
    columns = valid.columns
    scale = 1.0 / np.where(need > 0, need, np.maximum(floor, 1e-300))
    asked = sparse.diags_array(scale) @ valid.rate
    theta = sparse.csr_array((-need * scale)[:, None])
    matrix = sparse.csr_array(
        sparse.block_array([[valid.matrix, None], [asked, theta]], format="csr")
    )
    lower = np.concatenate([valid.lower, floor * scale])
    unbounded = np.full(len(need), np.inf)
    cost = np.zeros(columns + 1)
    cost[-1] = -1.0

    def form(upper: Floats) -> LinearProgram:
        return LinearProgram(
            cost,
            matrix,
            lower,
            np.concatenate([upper, unbounded]),
            np.zeros(columns + 1),
            np.append(valid.most, most),
            np.zeros(columns + 1, dtype=bool),
        )

    return LevelProgram(form(valid.upper), form(valid.relaxed_upper()))
