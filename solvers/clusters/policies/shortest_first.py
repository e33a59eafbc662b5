"""Shortest job first; see ``formulations.policies.shortest_first``."""

import numpy as np

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.policies import shortest_first
from stagewright.formulations.forms.answers import Limits
from stagewright.solvers.clusters.answer import AllocationResult
from stagewright.solvers.clusters.policies.fifo import in_order, most_value


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """The shortest job where it is fastest, then linear programs for the others.

    Where jobs choose among counts, all in order of their shortest durations, in two passes.
    """
    if problem.elastic:
        return in_order(problem, shortest_first.values, limits)
    value, floor = shortest_first.values(problem), shortest_first.floor(problem)
    found = most_value(problem, value, floor, limits)
    if found.allocation is None:
        return AllocationResult(found.status, None, None, None, None, maximises=False)
    shortest = problem.names[int(np.argmax(floor))]
    return AllocationResult(
        found.status,
        shortest_first.objective(problem, found.allocation),
        float(shortest_first.least_seconds(problem).min()),
        found.allocation,
        "combinatorial: no job is done sooner than at its fastest all of the time",
        maximises=False,
        notes=(
            f"job {shortest!r} is the shortest; the others are served in order of their shortest "
            f"durations, worth {found.value:.9g} of at most {found.bound:.9g} ({found.backend})",
        ),
    )
