"""Orders of the computations of given stages on groups of devices, which may share groups.

The makespan problem of the stages knows no all-reduces that take turns on a device. So it has some
order of them: what follows a stage's backwards is its own all-reduce and those after it. Several
orders are tried. Then the computations keep their times, and all-reduces and optimizer steps follow
as the checker prices them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import SHARED_SPLIT
from stagewright.formulations.plans.structure import Endings, Structure, Work, work_of
from stagewright.formulations.plans.timing import Blocks
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.row_search import RowSearch, compile_row_kernels
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

RULES = 100  # tried for each order of all-reduces
BEST = 2  # orders of all-reduces for which the schedule is then solved


def reorder(
    problem: PipelineProblem, known: Proposal, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """The stages of ``known`` in the best order found; never slower."""
    plans = class_of_proposal(known)
    if not SHARED_SPLIT.contains(plans) or plans.offload:
        return NoPlan("only split stages on groups of devices are reordered", proved=False)
    grouped = GroupedStages.of(problem, structure_of(known))
    best, cost, began = known, cost_of(problem, known), monotonic()

    def consider(times: Timetable) -> float:
        nonlocal best, cost
        found = replace(known, starts=grouped.starts(times))
        seconds = cost_of(problem, found)
        if seconds < cost and is_valid(problem, found):
            best, cost = found, seconds
        return seconds

    tried: dict[MakespanProblem, float] = {}
    compile_row_kernels()
    for scheduling in grouped.problems():
        if limits.left(monotonic() - began) > 0:
            rows = RowSearch(scheduling, limits.seed)
            rows.first()
            rows.try_rules(RULES)
            tried[scheduling] = consider(rows.timetable())
    for scheduling in sorted(tried, key=tried.__getitem__)[:BEST]:
        left = replace(limits, seconds=limits.left(monotonic() - began) / 2)
        if left.seconds > 0:
            times = solve_schedule(scheduling, "optimal", left).timetable
            assert times is not None
            consider(times)
    return best


def is_valid(problem: PipelineProblem, found: Proposal) -> bool:
    """Whether the checker accepts the plan."""
    return not check(problem, assemble(problem, "reordered", found.stages, found.starts))


@dataclass(frozen=True, slots=True, eq=False)
class GroupedStages:
    """Split stages on groups of devices, any two the same or disjoint, with their makespan problem.

    ``home`` is the group of each stage, numbered by first use.
    """

    work: Work
    endings: Endings
    home: tuple[int, ...]

    @classmethod
    def of(cls, problem: PipelineProblem, structure: Structure) -> "GroupedStages":
        """The stages of a structure of class ``SHARED_SPLIT``."""
        work, endings, _ = work_of(problem, structure)
        groups = list(dict.fromkeys(endings.devices))
        return cls(work, endings, tuple(groups.index(group) for group in endings.devices))

    def problems(self) -> Iterator[MakespanProblem]:
        """With all-reduces in parallel, and in several orders; none without enough memory."""
        work, home, _endings = self.work, np.array(self.home), self.endings
        room = self._room()
        held = np.bincount(home, work.kept)
        if (held > room).any():
            return
        seconds, count = work.seconds[:, :, 0], work.lane.shape[1]
        split = bool(work.split.any())
        is_limited = bool((held * count > room).any())
        for after in dict.fromkeys(map(tuple, self._after())):
            yield MakespanProblem(
                microbatches=count,
                forward=tuple(seconds[FORWARD].tolist()),
                backward=tuple(seconds[BACKWARD].tolist()),
                send_forward=_sends(seconds[SEND_F, :-1], work),
                send_backward=_sends(seconds[SEND_B, 1:], work),
                reduce=after,
                in_flight=(count,) * len(home),
                device=self.home,
                weight_gradient=tuple(seconds[WEIGHTS].tolist()) if split else None,
                saved=tuple((kept, 0.0, kept) for kept in work.kept.tolist()) if is_limited else (),
                memory=tuple(room.tolist()) if is_limited else (),
            )

    def _after(self) -> Iterator[Floats]:
        """What follows the backwards of every stage: update and all-reduces.

        Parallel; else the last stages first, but for a device's longest all-reduce, which is ahead
        of some of those that the others leave to the end.
        """
        home, stages = np.array(self.home), np.arange(len(self.home))
        reduce = np.nan_to_num(self.endings.reduce)
        update = np.nan_to_num(self.endings.update)
        yield reduce + update
        for ahead in range(np.bincount(home).max()):
            after = update.copy()
            for d in range(1 + home.max()):
                queue = stages[home == d][::-1].tolist()
                longest = max(queue, key=lambda s: reduce[s])
                place = max(0, queue.index(longest) - ahead)
                queue.remove(longest)
                queue.insert(place, longest)
                after[queue] += np.cumsum(reduce[queue][::-1])[::-1]
            yield after

    def _room(self) -> Floats:
        """Bytes for microbatches on each group, besides what a backward recomputes."""
        rooms = []
        for d in range(1 + max(self.home)):
            s = self.home.index(d)
            again = self.work.again[np.array(self.home) == d].max()
            rooms.append(float(self.work.room[list(self.endings.devices[s])].min()) - again)
        return np.maximum(rooms, 0.0)

    def starts(self, times: Timetable) -> Blocks:
        """The start times of all actions."""
        work, endings = self.work, self.endings
        starts: Floats = np.full_like(work.seconds, np.nan)
        starts[FORWARD], starts[BACKWARD] = times.forward, times.backward
        if times.weight_gradient is not None:
            starts[WEIGHTS] = times.weight_gradient
        sent = work.channel[:-1] >= 0
        starts[SEND_F, :-1] = np.where(sent, times.send_forward, np.nan)
        starts[SEND_B, 1:] = np.where(sent, times.send_backward, np.nan)
        reduces, updates, _ = ending_starts(work, endings, starts)
        return blocks_of_starts(work, starts, reduces, updates)


def _sends(seconds: Floats, work: Work) -> tuple[float, ...]:
    """Transfer times; none between stages on one group."""
    return tuple(np.where(work.channel[:-1, 0] < 0, 0.0, seconds).tolist())
