"""TEMPORARY wrapper, merged into exact.py."""

from stagewright.formulations.forms import Limits, OnProgress
from stagewright.formulations.pipeline import PipelineProblem
from stagewright.formulations.plan import Bound
from stagewright.solvers.planners.proposal import NoPlan, Proposal, named_stages


def plan_exact(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """The joint optimum where the search ends in time, else the best plan found and its bound."""
    from stagewright.solvers.planners.exact import exact

    answer = exact(problem, limits, on_progress)
    bounds = (Bound(answer.bound_seconds, "joint branch and bound", "problem"),)
    if answer.stages is None or answer.timetable is None:
        if answer.complete:
            return NoPlan("no partition and mapping fits in the devices' memory")
        return NoPlan("the joint search found no plan in time", proved=False, bounds=bounds)
    return Proposal(named_stages(problem, answer.stages), answer.timetable, bounds)
