"""A static partition; see ``formulations.policies.isolated``."""

from stagewright.formulations.allocation import AllocationProblem, allocation_of_shares
from stagewright.formulations.forms import Limits
from stagewright.formulations.policies import isolated
from stagewright.solvers.policies.answer import AllocationResult
from stagewright.solvers.policies.isolated import judged


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """Nothing is optimised; the bound is that of max-min fairness at the parts as weights."""
    part = isolated.static_parts(problem)
    allocation = allocation_of_shares(isolated.divided(problem, part))
    objective = isolated.objective(problem, allocation, part)
    return judged(problem, allocation, isolated.weighted(problem, part), objective, limits)
