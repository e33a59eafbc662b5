"""A better order of the computations of given stages, of which some share devices.

The makespan problem of the stages knows neither bytes nor all-reduces that take turns on a device.
So it is solved twice, with all-reduces in parallel and in the order of the stages, last stage
first. Then its computations keep their times, and all-reduces and optimizer steps follow as the
checker prices them. Memory limits the microbatches in flight of all stages of a device alike.
"""

from collections.abc import Iterator
from dataclasses import replace
from time import monotonic

import numpy as np

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import SHARED_SPLIT
from stagewright.formulations.plans.structure import Endings, Work, work_of
from stagewright.formulations.plans.timing import Blocks
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.pipelines.structure_run import BACKWARD, FORWARD, SEND_B, SEND_F, WEIGHTS
from stagewright.solvers.pipelines.structure_scheduling import blocks_of_starts, ending_starts
from stagewright.solvers.planners.proposal import (
    NoPlan,
    Proposal,
    class_of_proposal,
    cost_of,
    structure_of,
)


def reorder(
    problem: PipelineProblem, known: Proposal, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """The stages of ``known`` in the best order found; never slower."""
    plans = class_of_proposal(known)
    if not SHARED_SPLIT.contains(plans) or plans.offload:
        return NoPlan("only split stages on groups of devices are reordered", proved=False)
    work, endings, _ = work_of(problem, structure_of(known))
    best, cost, began = known, cost_of(problem, known), monotonic()
    for scheduling in _problems(work, endings):
        left = limits.left(monotonic() - began)
        if left <= 0:
            break
        solved = solve_schedule(scheduling, "optimal", replace(limits, seconds=left / 2))
        assert solved.timetable is not None
        found = replace(known, starts=_starts(work, endings, solved.timetable))
        seconds = cost_of(problem, found)
        plan = assemble(problem, "reordered", found.stages, found.starts)
        if seconds < cost and not check(problem, plan):
            best, cost = found, seconds
    return best


def _problems(work: Work, endings: Endings) -> Iterator[MakespanProblem]:
    """The makespan problems of the stages, if one microbatch in flight fits."""
    groups = list(dict.fromkeys(endings.devices))
    home = np.array([groups.index(group) for group in endings.devices])
    reduce, update = np.nan_to_num(endings.reduce), np.nan_to_num(endings.update)
    in_flight = _in_flight(work, groups, home)
    if in_flight.min() < 1:
        return
    queued = np.array([reduce[: s + 1][home[: s + 1] == d].sum() for s, d in enumerate(home)])
    seconds = work.seconds[:, :, 0]
    for after in dict.fromkeys((tuple(reduce + update), tuple(queued + update))):
        yield MakespanProblem(
            work.lane.shape[1],
            tuple(seconds[FORWARD].tolist()),
            tuple(seconds[BACKWARD].tolist()),
            tuple(np.where(work.channel[:, 0] < 0, 0.0, seconds[SEND_F])[:-1].tolist()),
            tuple(np.where(work.channel[:-1, 0] < 0, 0.0, seconds[SEND_B][1:]).tolist()),
            after,
            tuple(in_flight[home].tolist()),
            tuple(home.tolist()),
            tuple(seconds[WEIGHTS].tolist()) if work.split.any() else None,
        )


def _in_flight(work: Work, groups: list[tuple[int, ...]], home: Ints) -> Ints:
    """The most microbatches in flight of every stage of a group of devices."""
    most = []
    for d, group in enumerate(groups):
        kept, again = work.kept[home == d].sum(), work.again[home == d].max()
        room = float(work.room[list(group)].min()) - again
        limit = room // kept if kept > 0 else np.inf if room >= 0 else 0
        most.append(int(min(work.lane.shape[1], limit)))
    return np.array(most)


def _starts(work: Work, endings: Endings, times: Timetable) -> Blocks:
    """The start times of all actions."""
    starts: Floats = np.full_like(work.seconds, np.nan)
    starts[FORWARD], starts[BACKWARD] = times.forward, times.backward
    if times.weight_gradient is not None:
        starts[WEIGHTS] = times.weight_gradient
    sent = work.channel[:-1] >= 0
    starts[SEND_F, :-1] = np.where(sent, times.send_forward, np.nan)
    starts[SEND_B, 1:] = np.where(sent, times.send_backward, np.nan)
    reduces, updates, _ = ending_starts(work, endings, starts)
    return blocks_of_starts(work, starts, reduces, updates)
