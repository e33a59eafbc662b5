"""Minimum cost under SLOs (thesis 6.4.3): ``cost`` with a floor for every job that has one.

throughput(m, X) >= num_iterations_m / SLO_m

If the floors cannot all be had, the total of the parts that are missing is minimised first:

minimise_X,s  sum_m s_m   such that   throughput(m, X) >= (1 - s_m) * num_iterations_m / SLO_m
"""

import numpy as np
from scipy import sparse

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.polytope import Polytope
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.arrays import Bools, Floats, Ints


def needs(problem: AllocationProblem) -> Floats:
    """Steps per second that meet each job's SLO; 0 without one, or if it has passed."""
    left = problem.deadline_seconds
    open_ = np.isfinite(left) & (left > 0)
    return np.asarray(np.where(open_, problem.steps / np.where(open_, left, 1.0), 0.0))


def too_fast(problem: AllocationProblem) -> Bools:
    """Jobs whose SLO asks for more than any accelerator gives."""
    return np.asarray(needs(problem) > problem.best_rates() * (1 + 1e-9))


def shortfall_program(valid: Polytope, floor: Floats) -> tuple[LinearProgram, Ints]:
    """The form, whose last columns are s of the groups with a floor, and those groups."""
    groups = np.flatnonzero(floor)
    count = len(groups)
    scale = sparse.diags_array(1 / floor[groups])
    rows = sparse.block_array(
        [[valid.matrix, None], [scale @ valid.rate[groups], sparse.eye_array(count, format="csr")]],
        format="csr",
    )
    columns = valid.columns + count
    form = LinearProgram(
        np.concatenate([np.zeros(valid.columns), np.ones(count)]),
        sparse.csr_array(rows),
        np.concatenate([valid.lower, np.ones(count)]),
        np.concatenate([valid.upper, np.full(count, np.inf)]),
        np.zeros(columns),
        np.concatenate([valid.most, np.ones(count)]),
        np.zeros(columns, dtype=bool),
    )
    return form, groups


def notes(problem: AllocationProblem, floor: Floats) -> tuple[str, ...]:
    """A line for each job that misses its SLO; ``floor`` is its possible steps per second."""
    need, best, hopeless = needs(problem), problem.best_rates(), too_fast(problem)
    found = []
    for job in np.flatnonzero(np.isfinite(problem.deadline_seconds)):
        left = problem.deadline_seconds[job]
        asks = f"needs {need[job]:.4g} steps/s to meet its SLO in {left / 3600:.3g} h"
        if left <= 0:
            text = f"its SLO passed {-left / 3600:.3g} h ago; served as if it had none"
        elif hopeless[job]:
            text = (
                f"{asks}, no accelerator is fast enough (at best {best[job]:.4g}: no SLO below "
                f"{_hours(problem, job, best)} can be met); served as if it had none"
            )
        elif floor[job] < need[job] * (1 - 1e-6):
            when = f", by which it takes {_hours(problem, job, floor)}" if floor[job] else ""
            text = f"{asks}, gets {floor[job]:.4g} at best together with the others{when}"
        else:
            continue
        found.append(f"job {problem.names[job]!r}: {text}")
    return tuple(found)


def _hours(problem: AllocationProblem, job: np.signedinteger, rate: Floats) -> str:
    """How long the rest of a job takes at its rate."""
    return f"{problem.steps[job] / rate[job] / 3600:.3g} h"
