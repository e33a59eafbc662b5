"""Max-min fairness; see ``formulations.policies.max_min``."""

from stagewright.formulations.allocation import AllocationProblem
from stagewright.formulations.forms import Limits
from stagewright.formulations.policies import max_min
from stagewright.solvers.levels import central_level
from stagewright.solvers.policies.answer import AllocationResult


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """One linear program over the classes of equal jobs."""
    level = central_level(problem, max_min.needs(problem), limits)
    if level.allocation is None:
        return AllocationResult(level.status, None, None, None, None)
    return AllocationResult(
        level.status,
        max_min.objective(problem, level.allocation),
        level.bound,
        level.allocation,
        f"duals of the linear program over groups of jobs ({level.backend})",
    )
