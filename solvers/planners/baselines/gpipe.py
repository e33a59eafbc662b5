"""GPipe: equal numbers of layers on every device, all forwards before all backwards."""

import numpy as np

from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.pipelines.bppm import StageChoice, makespan_problem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.solvers.pipelines.list_scheduling import list_schedule
from stagewright.solvers.planners.steps.proposal import (
    NoPlan,
    Proposal,
    named_stages,
    proposal_of,
    shortage,
)
from stagewright.solvers.planners.structures.uniform import UniformPlanner


def plan_gpipe(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """GPipe as SPP describes it (section II): no replication, devices in the cluster's order."""
    count = min(len(problem.chain), len(problem.cluster))
    parts = np.array_split(np.arange(len(problem.chain)), count)
    stages = tuple(
        StageChoice(int(part[0]), int(part[-1]) + 1, (v,)) for v, part in enumerate(parts)
    )
    scheduling = makespan_problem(problem, stages)
    times = list_schedule(scheduling, "gpipe") if scheduling else None
    if times is None:
        return NoPlan(shortage(problem, stages, in_flight=problem.microbatches))
    return proposal_of(problem, named_stages(problem, stages), times)


PLANNER = UniformPlanner(
    "gpipe", "equal numbers of layers, all forwards first", "Huang et al., NeurIPS 2019", plan_gpipe
)
