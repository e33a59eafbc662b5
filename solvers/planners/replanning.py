"""A plan for a changed problem from the plan for the problem before.

The given plan is mapped to the present devices and timed again. Its stages are also spread anew:
over all present devices, with layers divided by the present times. The best of these are improved
by the search that makes plans of the same kind.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.pipelines.grouped_stages import splits
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.plans.structure import Structure, misfit, work_of
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.solvers.pipelines.structures.scheduling import best_schedule, rules_for
from stagewright.solvers.planners.grouped import GroupedSearch, can_vary
from stagewright.solvers.planners.steps.planner import PlanSearch
from stagewright.solvers.planners.steps.proposal import Choices, NoPlan, Proposal, structure_of
from stagewright.solvers.planners.steps.warm_start import warm_start
from stagewright.solvers.planners.structures.arrangements import (
    every_balanced_cuts,
    stage_seconds,
)
from stagewright.solvers.planners.structures.refine import refine

Stages = tuple[Stage, ...]

_REFINING = 0.15  # share of the time, for any change of a few stages


def replan(
    problem: PipelineProblem,
    given: PipelinePlan,
    choices: Choices,
    limits: Limits,
    on_progress: OnProgress,
) -> Proposal | NoPlan:
    """The best plan found near the given one, never worse than that with the present times."""
    search = PlanSearch(problem, limits, on_progress)
    best = warm_start(problem, given, choices, limits)
    if isinstance(best, NoPlan) or search.left() <= 0:
        return best
    notes = best.notes
    if can_vary(best.stages):
        known = [best]
        for structure in _spread(problem, best):
            if search.left() > limits.seconds / 2:
                known += _listed(problem, structure)
        left = replace(limits, seconds=max(0.0, search.left() - _REFINING * limits.seconds))
        found = GroupedSearch(problem, left, on_progress).run(known, left)
        best = best if isinstance(found, NoPlan) else found
        notes = tuple(dict.fromkeys((*notes, *best.notes)))
    best = replace(best, notes=notes)
    return refine(problem, best, replace(limits, seconds=search.left()), on_progress)


def _listed(problem: PipelineProblem, structure: Structure) -> list[Proposal]:
    """The structure in a list schedule, if it fits in memory."""
    work, endings, _ = work_of(problem, structure)
    if misfit(problem, structure) is not None:
        return []
    found = best_schedule(work, endings, rules_for(work)[:1])
    return [] if found is None else [Proposal(structure.stages, found.starts)]


def _spread(problem: PipelineProblem, known: Proposal) -> list[Structure]:
    """The stages with the layers divided anew, on the same groups and on groups of all devices."""
    names = [one.name for one in problem.cluster.devices]
    order = recursive_device_order(problem.cluster)
    groups = list(dict.fromkeys(stage.devices for stage in known.stages))
    anew = [tuple(names[v] for v in part) for part in np.array_split(order, len(groups))]
    found: dict[Structure, None] = {}
    for places in (groups, anew, anew[::-1]):
        of = dict(zip(groups, places, strict=True))
        stages = _divided(problem, [replace(one, devices=of[one.devices]) for one in known.stages])
        if stages is not None:
            whole = (False,) * len(stages)
            split = splits(problem, stages) if any(structure_of(known).split) else whole
            found[Structure(stages, split)] = None
    return [*found]


def _divided(problem: PipelineProblem, stages: Sequence[Stage]) -> Stages | None:
    """The stages with the cuts for which the busiest devices have the least to do, about.

    None if a group is too large for the microbatches.
    """
    index = problem.cluster.index
    count = {stage.devices: 0 for stage in stages}
    for stage in stages:
        count[stage.devices] += 1
    tables = {
        devices: times * stage_seconds(problem, tuple(index[one] for one in devices), False)
        for devices, times in count.items()
    }
    cuts = every_balanced_cuts([tables[stage.devices] for stage in stages])[-1]
    if cuts is None:
        return None
    return tuple(
        replace(stage, layers=layers) for stage, layers in zip(stages, pairwise(cuts), strict=True)
    )
