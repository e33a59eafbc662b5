"""Orders of the computations of given stages on groups of devices, which may share groups.

The computations get their times from a makespan problem; then all-reduces and optimizer steps
follow as the checker prices them. One problem has no turns of all-reduces: a bound on it is one on
every plan of the stages. The others have some order of the all-reduces.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import monotonic

import numpy as np

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.pipelines.grouped_stages import (
    GroupedStages,
    is_grouped,
    relaxed_schedule,
)
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.plan_class import SHARED_SPLIT, SHARED_WHOLE
from stagewright.formulations.plans.structure import ending_starts
from stagewright.formulations.plans.timing import Blocks
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.rows.search import RowSearch, compile_row_kernels
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.pipelines.structures.run import BACKWARD, FORWARD, SEND_B, SEND_F, WEIGHTS
from stagewright.solvers.pipelines.structures.scheduling import blocks_of_starts
from stagewright.solvers.planners.steps.proposal import NoPlan, Proposal, cost_of, structure_of

RULES = 100  # tried for each order of all-reduces
BEST = 2  # orders of all-reduces for which the schedule is then solved
TIGHT = 1e-6  # relative; an order this near to its bound is not improved


def reorder(
    problem: PipelineProblem, known: Proposal, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """The stages of ``known`` in the best order found, with a bound on all orders; never slower."""
    if not is_grouped(known.stages) or any(stage.offload for stage in known.stages):
        return NoPlan("only split stages on groups of devices are reordered", proved=False)
    compile_row_kernels()
    search = _Reordering(problem, known, limits)
    search.run()
    proved = () if search.bound is None else (search.bound,)
    return replace(search.best, bounds=(*known.bounds, *proved))


@dataclass
class _Reordering:
    """The best order so far, and the best bound on all orders."""

    problem: PipelineProblem
    best: Proposal
    limits: Limits
    began: float = field(default_factory=monotonic)
    bound: Bound | None = None

    def __post_init__(self) -> None:
        structure = structure_of(self.best)
        self.parts = any(structure.split)
        self.grouped = GroupedStages.of(self.problem, structure)
        self.relaxed = relaxed_schedule(self.problem, structure.stages, self.parts)
        self.cost = cost_of(self.problem, self.best)

    def run(self) -> None:
        """Try rules for every order of all-reduces, then solve the best ones and the relaxation."""
        tried = sorted(self._tried(), key=lambda entry: entry[0])[:BEST]
        known: dict[MakespanProblem, Timetable | None]
        known = {scheduling: times for _, scheduling, times in tried}
        if self.relaxed is not None and self.relaxed not in known:
            known[self.relaxed] = None
        for number, (scheduling, times) in enumerate(known.items()):
            left = self._left() / (len(known) - number)
            if left > 0 and not self._is_proved():
                self._solve(scheduling, times, left)

    def _tried(self) -> Iterator[tuple[float, MakespanProblem, Timetable]]:
        for scheduling in self.grouped.problems():
            if self._left() > 0:
                rows = RowSearch(scheduling, self.limits.seed)
                rows.first()
                rows.try_rules(RULES)
                times = rows.timetable()
                yield self._consider(times), scheduling, times

    def _solve(self, scheduling: MakespanProblem, times: Timetable | None, seconds: float) -> None:
        limits = replace(self.limits, seconds=seconds)
        solved = solve_schedule(scheduling, "optimal", limits, incumbent=times)
        assert solved.timetable is not None
        if times is not None:
            self._consider(solved.timetable)
        if scheduling == self.relaxed:
            plans = SHARED_SPLIT if self.parts else SHARED_WHOLE
            self.bound = Bound(solved.bound, solved.proved_by, "schedule", plans)

    def _consider(self, times: Timetable) -> float:
        found = replace(self.best, starts=grouped_starts(self.grouped, times))
        seconds = cost_of(self.problem, found)
        if seconds < self.cost and is_valid(self.problem, found):
            self.best, self.cost = found, seconds
        return seconds

    def _is_proved(self) -> bool:
        return self.bound is not None and self.cost <= self.bound.seconds * (1 + TIGHT)

    def _left(self) -> float:
        return self.limits.left(monotonic() - self.began)


def is_valid(problem: PipelineProblem, found: Proposal) -> bool:
    """Whether the checker accepts the plan."""
    return not check(problem, assemble(problem, "reordered", found.stages, found.starts))


def grouped_starts(grouped: GroupedStages, times: Timetable) -> Blocks:
    """The start times of all actions of a timetable."""
    work, endings = grouped.work, grouped.endings
    starts: Floats = np.full_like(work.seconds, np.nan)
    starts[FORWARD], starts[BACKWARD] = times.forward, times.backward
    if times.weight_gradient is not None:
        starts[WEIGHTS] = times.weight_gradient
    sent = work.channel[:-1] >= 0
    starts[SEND_F, :-1] = np.where(sent, times.send_forward, np.nan)
    starts[SEND_B, 1:] = np.where(sent, times.send_backward, np.nan)
    reduces, updates, _ = ending_starts(work, endings, starts)
    return blocks_of_starts(work, starts, reduces, updates)
