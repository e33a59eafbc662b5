"""Balanced pipelines on groups of neighbouring devices: a good first plan at little cost."""

import math
from collections.abc import Iterator
from time import monotonic

import numpy as np

from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.pipelines.bounds.stages import quick_bound
from stagewright.formulations.pipelines.bppm import StageChoice, makespan_problem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.solvers.pipelines.list_scheduling import list_schedule
from stagewright.solvers.planners.steps.proposal import NoPlan, Proposal, named_stages, proposal_of
from stagewright.solvers.planners.structures.arrangements import balanced_cuts, lengths


def plan_balanced(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """The best 1F1B schedule of equal groups in SPP's order of devices, for few stage counts."""
    began, best, seconds = monotonic(), None, math.inf
    for stages in _stages(problem):
        if limits.left(monotonic() - began) <= 0:
            break
        scheduling = makespan_problem(problem, stages)
        if scheduling is None or quick_bound(scheduling) >= seconds:
            continue
        times = list_schedule(scheduling, "1f1b")
        if times is not None and times.makespan(scheduling) < seconds:
            best, seconds = (stages, times), times.makespan(scheduling)
    if best is None:
        return NoPlan("no balanced pipeline of equal groups of devices fits", proved=False)
    return proposal_of(problem, named_stages(problem, best[0]), best[1])


def _stages(problem: PipelineProblem) -> Iterator[tuple[StageChoice, ...]]:
    usable = int(problem.replicas_per_layer.sum())  # no layer can be split among more devices
    order = recursive_device_order(problem.cluster)[:usable]
    for count in reversed(lengths(len(order), len(problem.chain))):
        groups = [tuple(part.tolist()) for part in np.array_split(np.array(order), count)]
        cuts = balanced_cuts(problem, groups, round_robin=False)
        if cuts is not None:
            yield tuple(StageChoice(cuts[s], cuts[s + 1], group) for s, group in enumerate(groups))
