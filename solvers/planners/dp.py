"""Data parallelism: the whole model on every device (SPP section V-A, baseline i)."""

from stagewright.formulations.bppm import StageChoice
from stagewright.formulations.forms import Limits, OnProgress
from stagewright.formulations.pipeline import PipelineProblem
from stagewright.formulations.spp import makespan_problem
from stagewright.solvers.list_scheduling import list_schedule
from stagewright.solvers.planners.proposal import NoPlan, Proposal, named_stages, shortage


def plan_dp(problem: PipelineProblem, limits: Limits, on_progress: OnProgress) -> Proposal | NoPlan:
    """One stage on all devices: each microbatch is split among them, then one all-reduce."""
    whole = (StageChoice(0, len(problem.chain), tuple(range(len(problem.cluster)))),)
    scheduling = makespan_problem(problem, whole)
    if scheduling is None:
        return NoPlan(shortage(problem, whole))
    times = list_schedule(scheduling, "1f1b")
    assert times is not None  # 1F1B keeps every limit
    return Proposal(named_stages(problem, whole), times)
