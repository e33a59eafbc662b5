"""Maximum total throughput; see ``formulations.policies.throughput``."""

import numpy as np

from stagewright.formulations.allocation import AllocationProblem
from stagewright.formulations.duality import weak_duality_bound
from stagewright.formulations.forms import Limits
from stagewright.formulations.policies import throughput
from stagewright.formulations.polytope import group_by, polytope
from stagewright.solvers import backend
from stagewright.solvers.policies.answer import AllocationResult


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """One linear program over the kinds of jobs."""
    valid = polytope(problem, group_by(problem))
    form = throughput.throughput_program(valid)
    answer = backend.solve(form, limits=limits)
    if answer.values is None or answer.duals is None:
        return AllocationResult(answer.status, None, None, None, None)
    allocation = valid.invert(np.clip(answer.values, 0.0, valid.most))
    return AllocationResult(
        answer.status,
        throughput.objective(problem, allocation),
        -weak_duality_bound(form, answer.duals),
        allocation,
        f"duals of the linear program over kinds of jobs ({answer.backend})",
    )
