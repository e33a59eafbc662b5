"""Fairness over a tree of entities; see ``formulations.policies.hierarchical``."""

from stagewright.formulations.allocation import AllocationProblem
from stagewright.formulations.forms import Limits
from stagewright.formulations.policies import hierarchical
from stagewright.solvers.policies.answer import AllocationResult
from stagewright.solvers.policies.water_filling import fill


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """Water filling with the weights that the tree gives."""
    return fill(problem, hierarchical.tree(problem), limits)
