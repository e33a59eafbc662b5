"""Max-min fairness; see ``formulations.policies.max_min``."""

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.policies import max_min
from stagewright.formulations.forms.answers import Limits
from stagewright.solvers.clusters.answer import AllocationResult
from stagewright.solvers.clusters.levels import central_level, max_level


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """One linear program over the classes of equal jobs.

    Where moves cost time a vertex answers: in an interior point all jobs take turns everywhere.
    """
    need = max_min.needs(problem)
    if problem.restart_seconds.any():
        level = max_level(problem, need, limits=limits)
    else:
        level = central_level(problem, need, limits)
    if level.allocation is None:
        return AllocationResult(level.status, None, None, None, None)
    return AllocationResult(
        level.status,
        max_min.objective(problem, level.allocation),
        level.bound,
        level.allocation,
        f"duals of the linear program over groups of jobs ({level.backend})",
        one_more=level.price,
    )
