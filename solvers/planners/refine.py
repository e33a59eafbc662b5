"""Local search on the stages of a plan, with the makespan as objective instead of SPP's W."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from time import monotonic

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress
from stagewright.formulations.pipelines.bounds import quick_bound
from stagewright.formulations.pipelines.bppm import StageChoice
from stagewright.formulations.pipelines.makespan import Timetable
from stagewright.formulations.pipelines.spp import makespan_problem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.solvers.pipelines.list_scheduling import best_list_schedule
from stagewright.solvers.planners.proposal import (
    Proposal,
    choices_of,
    cost_of,
    named_stages,
    proposal_of,
)

Stages = tuple[StageChoice, ...]

WORTH_IT = 1e-9  # relative improvement; less is rounding


def refine(
    problem: PipelineProblem,
    known: Proposal,
    limits: Limits,
    on_progress: OnProgress,
    attempts: float = math.inf,
) -> Proposal:
    """Hill climbing until no neighbour has a shorter list schedule, or a limit comes.

    ``known`` must consist of split stages; ``attempts`` limits the number of neighbours examined. A
    neighbour moves layers or a device across one border, merges two stages, splits one into two, or
    leaves a device of a stage idle. Most of them are pruned by a bound on their schedules.
    """
    began = monotonic()
    stages, seconds = choices_of(problem, known.stages), cost_of(problem, known)
    times: Timetable | None = None
    steps = examined = 0
    queue = _neighbours(stages)
    while (neighbour := next(queue, None)) is not None:
        examined += 1
        if examined > attempts or limits.left(monotonic() - began) <= 0:
            break
        found = _schedule(problem, neighbour, seconds * (1 - WORTH_IT))
        if found is not None:
            stages, (times, seconds), steps = neighbour, found, steps + 1
            queue = _neighbours(stages)
            made = partial(proposal_of, problem, named_stages(problem, stages), times)
            on_progress(Progress(monotonic() - began, seconds, 0.0, made))
    if times is None:
        return known
    notes = (*known.notes, f"stages refined in {steps} steps")
    return proposal_of(problem, named_stages(problem, stages), times, known.bounds, notes)


def _schedule(
    problem: PipelineProblem, stages: Stages, ceiling: float
) -> tuple[Timetable, float] | None:
    """The best list schedule and its makespan, if that is below ``ceiling``."""
    scheduling = makespan_problem(problem, stages)
    if scheduling is None:
        return None
    if quick_bound(scheduling) >= ceiling:
        return None
    times = best_list_schedule(scheduling)[1]
    seconds = times.makespan(scheduling)
    return (times, seconds) if seconds < ceiling else None


def _neighbours(stages: Stages) -> Iterator[Stages]:
    for s, stage in enumerate(stages):
        before, after = stages[:s], stages[s + 1 :]
        if after:
            for pair in _across(stage, after[0]):
                yield (*before, *pair, *after[1:])
        for halves in _cuts(stage):
            yield (*before, *halves, *after)
        if len(stage.devices) > 1:
            yield (*before, replace(stage, devices=stage.devices[:-1]), *after)
            yield (*before, replace(stage, devices=stage.devices[1:]), *after)


def _across(one: StageChoice, other: StageChoice) -> Iterator[Stages]:
    """Two neighbouring stages with their border moved, or merged."""
    for shift in (1, -1, 2, -2):
        border = one.stop + shift
        if one.start < border < other.stop:
            yield replace(one, stop=border), replace(other, start=border)
    devices = one.devices + other.devices
    for split in (len(one.devices) + 1, len(one.devices) - 1):
        if 0 < split < len(devices):
            yield replace(one, devices=devices[:split]), replace(other, devices=devices[split:])
    yield (StageChoice(one.start, other.stop, devices),)


def _cuts(stage: StageChoice) -> Iterator[Stages]:
    """The stage split into two, about evenly in layers and devices."""
    middle, half = (stage.start + stage.stop) // 2, len(stage.devices) // 2
    if middle > stage.start and half > 0:
        for border in {middle, middle + 1} & set(range(stage.start + 1, stage.stop)):
            yield (
                StageChoice(stage.start, border, stage.devices[:half]),
                StageChoice(border, stage.stop, stage.devices[half:]),
            )
