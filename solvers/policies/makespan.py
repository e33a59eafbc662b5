"""Minimum makespan; see ``formulations.policies.makespan``."""

from stagewright.formulations.allocation import AllocationProblem
from stagewright.formulations.forms import Limits
from stagewright.formulations.policies import makespan
from stagewright.solvers.levels import central_level
from stagewright.solvers.policies.answer import AllocationResult


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """One linear program in 1 / T: every job's throughput is at least num_steps / T."""
    level = central_level(problem, problem.steps, limits)
    if level.allocation is None:
        return AllocationResult(level.status, None, None, None, None, maximises=False)
    return AllocationResult(
        level.status,
        makespan.objective(problem, level.allocation),
        1 / level.bound,
        level.allocation,
        f"duals of the linear program in 1/T over groups of jobs ({level.backend})",
        maximises=False,
    )
