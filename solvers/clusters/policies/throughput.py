"""Maximum total throughput; see ``formulations.policies.throughput``."""

import numpy as np

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.policies import throughput
from stagewright.formulations.clusters.polytope import group_by, polytope
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.forms.models import weak_duality_bound
from stagewright.solvers.backends import backend
from stagewright.solvers.clusters.answer import AllocationResult


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
        one_more=valid.prices(answer.duals),
    )
