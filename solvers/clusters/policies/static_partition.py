"""A static partition; see ``formulations.policies.isolated``."""

from stagewright.formulations.clusters.allocation import AllocationProblem, allocation_of_shares
from stagewright.formulations.clusters.policies import isolated
from stagewright.formulations.forms.answers import Limits
from stagewright.solvers.clusters.answer import AllocationResult
from stagewright.solvers.clusters.policies.isolated import judged


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """Nothing is optimised; the bound is that of max-min fairness at the parts as weights."""
    part = isolated.static_parts(problem)
    allocation = allocation_of_shares(isolated.divided(problem, part))
    objective = isolated.objective(problem, allocation, part)
    return judged(problem, allocation, isolated.weighted(problem, part), objective, limits)
