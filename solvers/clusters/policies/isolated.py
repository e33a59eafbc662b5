"""X^isolated; see ``formulations.policies.isolated``. The gap shows what sharing would bring."""

import math

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem
from stagewright.formulations.clusters.policies import isolated, max_min
from stagewright.formulations.forms.answers import Limits, Status, settled
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.clusters.answer import AllocationResult
from stagewright.solvers.clusters.levels import ROUNDING, max_level


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """Nothing is optimised; the bound is that of max-min fairness."""
    allocation = isolated.isolated(problem)
    return judged(
        problem, allocation, max_min.needs(problem), max_min.objective(problem, allocation), limits
    )


def judged(
    problem: AllocationProblem,
    allocation: Allocation,
    need: Floats,
    objective: float,
    limits: Limits,
) -> AllocationResult:
    """``allocation`` beside the best least throughput in terms of ``need``, 0 for no claim."""
    claims = need > 0
    level = max_level(problem.of(claims), need[claims], limits=limits)
    proved = level.allocation is not None
    least = -level.bound if proved else -math.inf
    return AllocationResult(
        settled(Status.FEASIBLE, -objective, least, ROUNDING),
        objective,
        level.bound if proved else None,
        allocation,
        f"duals of the max-min linear program over groups of jobs ({level.backend})"
        if proved
        else None,
    )
