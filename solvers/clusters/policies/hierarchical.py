"""Fairness over a tree of entities; see ``formulations.policies.hierarchical``."""

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.policies import water_filling
from stagewright.formulations.forms.answers import Limits
from stagewright.solvers.clusters.answer import AllocationResult
from stagewright.solvers.clusters.policies.water_filling import fill


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """Water filling with the weights that the tree gives."""
    return fill(problem, water_filling.tree(problem), limits)
