"""AlloX; see ``formulations.policies.allox``.

The public implementation leaves jobs where they run until they are done; an answer from the
problem alone cannot know who runs, and matches all of them anew.
"""

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.policies import allox
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.forms.models import weak_duality_bound
from stagewright.solvers.backends.backend import solve as solve_form
from stagewright.solvers.clusters.answer import AllocationResult


def solve(problem: AllocationProblem, limits: Limits) -> AllocationResult:
    """Solve one transportation problem; the objective is the queues' mean completion time."""
    asked = allox.matching(problem)
    answer = solve_form(asked.form, None, limits)
    if answer.values is None or answer.duals is None:
        return AllocationResult(answer.status, None, None, None, None, maximises=False)
    waiting = allox.queues(problem, asked, answer.values)
    allocation = allox.running(problem, waiting)
    waited = float(problem.elapsed_seconds.mean())
    least = weak_duality_bound(asked.form, answer.duals) * asked.unit_seconds / len(problem)
    return AllocationResult(
        answer.status,
        allox.objective(problem, waiting),
        waited + least,
        allocation,
        f"duals of the transportation problem ({answer.backend})",
        maximises=False,
        notes=(f"{len(allocation.job)} jobs run, {len(problem) - len(allocation.job)} wait",),
    )
