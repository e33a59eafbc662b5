"""Branch and bound on relaxed plans, which can only raise the bound of a label search.

A node fixes the last stages, and says which stages are not possible before them. The search over
labels either proves that no plan of the node is in time, or returns a relaxed plan, on whose last
free stage the node branches. If all stages are fixed, their schedule at the nearest places may be
too long; otherwise places are fixed in the same way, and then the schedule decides. The more stages
are fixed, the more exactly the search knows the round trip behind a stage.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import monotonic

from stagewright.formulations.forms.answers import Limits, StopToken, is_stopped
from stagewright.formulations.pipelines.bounds import schedule_bounds
from stagewright.formulations.pipelines.server_relaxation import RelaxedStage, ServerRelaxation
from stagewright.formulations.pipelines.server_schedule import (
    choice_of,
    nearest,
    relaxed_schedule,
)
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.pipelines.server_search import (
    STEPS_PER_SECOND,
    OnPlan,
    ServerSearch,
)

FIRST_STEP = 1e-3  # relative; doubled with every proof
SCHEDULE_SECONDS = 2.0  # for the schedule of one relaxed plan


@dataclass(frozen=True, slots=True)
class _Node:
    """The relaxation with fewer stages and places.

    Stages from layer ``fixed`` on are fixed, and those from layer ``placed`` on are placed.
    """

    form: ServerRelaxation
    fixed: int
    placed: int


@dataclass
class ServerTree:
    """The tree of one search over split stages; ``on_plan`` receives its relaxed plans.

    ``stop`` ends the work early, like a time limit.
    ``least`` is the least bound on the schedules of a relaxed plan that ended a search.
    """

    search: ServerSearch
    on_plan: OnPlan
    stop: StopToken | None = None
    least: float = math.inf
    scheduled: dict[tuple[RelaxedStage, ...], float] = field(default_factory=dict)
    solved: set[tuple[RelaxedStage, ...]] = field(default_factory=set)  # by CP-SAT

    def raised(self, low: float, most: float, until: float) -> float:
        """The largest time from ``low``, which is proved, to ``most`` that is proved too short."""
        step = FIRST_STEP
        while low < most and monotonic() < until:
            target = min(most, low * (1 + step))
            if self.proves(target, until):
                low, step = target, 2 * step
            elif self.least < target:
                most = self.least
            else:
                break
        return low

    def proves(self, seconds: float, until: float) -> bool:
        """Whether no relaxed plan takes less than ``seconds``; False if not known in time."""
        layers = len(self.search.form.parameters) - 1
        nodes = [_Node(self.search.form, layers, layers)]
        while nodes:
            if monotonic() >= until or is_stopped(self.stop):
                return False
            node = nodes.pop()
            steps = (until - monotonic()) * STEPS_PER_SECOND
            found = self.search.answer(seconds, steps, node.form)
            if found.proves:
                continue
            plan = found.plan
            if not plan or plan[0].start > 0:  # no answer in time, or not all stages were kept
                return False
            self.on_plan(plan)
            if node.fixed > 0:
                last = next(stage for stage in plan[::-1] if stage.stop <= node.fixed)
                nodes += _by_stage(node, last)
            elif node.placed > 0 and self._bound(nearest(node.form, plan)) < seconds:
                last = next(stage for stage in plan[::-1] if stage.stop <= node.placed)
                nodes += _by_place(node, last)
            elif node.placed == 0 and self._schedule(plan, seconds, until) < seconds:
                self.least = min(self.least, self.scheduled[plan])
                return False
        return True

    def _bound(self, plan: tuple[RelaxedStage, ...]) -> float:
        """A bound on the schedules of a relaxed plan."""
        if plan not in self.scheduled:
            problem = relaxed_schedule(self.search.form, plan)
            self.scheduled[plan] = max(one.seconds for one in schedule_bounds(problem))
        return self.scheduled[plan]

    def _schedule(self, plan: tuple[RelaxedStage, ...], seconds: float, until: float) -> float:
        """A bound on the schedules of a relaxed plan, by CP-SAT if the others are too low."""
        if self._bound(plan) < seconds and plan not in self.solved:
            self.solved.add(plan)
            left = max(0.0, min(SCHEDULE_SECONDS, until - monotonic()))
            problem = relaxed_schedule(self.search.form, plan)
            solved = solve_schedule(problem, "optimal", Limits(seconds=left, stop=self.stop))
            self.scheduled[plan] = max(self.scheduled[plan], solved.bound)
        return self.scheduled[plan]


def _by_stage(node: _Node, stage: RelaxedStage) -> Iterator[_Node]:
    """Branch on a stage: relaxed plans without the stage, and plans with the stage."""
    form, start, stop = node.form, stage.start, stage.stop
    at = choice_of(form, stage), start, stop
    without, alone = form.limit.copy(), form.limit.copy()
    without[at] = 0
    alone[:, :stop, start + 1 :] = 0  # the stages that share a layer with it
    alone[at] = form.limit[at]
    yield replace(node, form=form._replace(limit=without))
    yield replace(node, form=form._replace(limit=alone), fixed=start)


def _by_place(node: _Node, stage: RelaxedStage) -> Iterator[_Node]:
    """Branch on a stage's place: plans with the stage at another place, and at its place."""
    form, bit = node.form, 1 << stage.place
    others, here = form.places.copy(), form.places.copy()
    others[stage.start] &= ~bit
    here[stage.start] = bit
    yield replace(node, form=form._replace(places=others))
    yield replace(node, form=form._replace(places=here), placed=stage.start)
