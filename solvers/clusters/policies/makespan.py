"""Minimum makespan; see ``formulations.policies.makespan``."""

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.policies import makespan
from stagewright.formulations.forms.answers import Limits
from stagewright.solvers.clusters.answer import AllocationResult
from stagewright.solvers.clusters.levels import central_level


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
