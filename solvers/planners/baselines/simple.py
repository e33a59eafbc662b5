"""SPP's simplest baselines (section V-A): data parallelism, and GPipe without replication."""

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


def plan_dp(problem: PipelineProblem, limits: Limits, on_progress: OnProgress) -> Proposal | NoPlan:
    """One stage on all devices, which split each microbatch, followed by one all-reduce.

    If there are more devices than samples in a microbatch, the surplus devices stay idle.
    """
    layers = len(problem.chain)
    devices = range(min(len(problem.cluster), problem.most_replicas(0, layers)))
    whole = (StageChoice(0, layers, tuple(devices)),)
    scheduling = makespan_problem(problem, whole)
    if scheduling is None:
        return NoPlan(shortage(problem, whole))
    times = list_schedule(scheduling, "1f1b")
    assert times is not None  # 1F1B keeps every limit
    return proposal_of(problem, named_stages(problem, whole), times)


DP = UniformPlanner(
    "dp", "data parallelism: the whole model on every device", "SPP section V-A, baseline", plan_dp
)


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


GPIPE = UniformPlanner(
    "gpipe", "equal numbers of layers, all forwards first", "Huang et al., NeurIPS 2019", plan_gpipe
)
