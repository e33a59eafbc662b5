"""Branch and bound on relaxed plans: a bound no lower than that of one search over labels.

A node fixes the last stages, and says which stages and places are not possible before them. The
search over labels either proves that no plan of the node is in time, or returns a relaxed plan, on
whose last free stage the node branches. If all stages are fixed, their schedule decides. The more
stages are fixed, the more exactly the search knows the round trip behind a stage.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.bounds import schedule_bounds
from stagewright.formulations.pipelines.server_relaxation import RelaxedStage, ServerRelaxation
from stagewright.formulations.pipelines.server_schedule import choice_of, relaxed_schedule
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.pipelines.server_search import (
    MARGIN,
    STEPS_PER_SECOND,
    OnPlan,
    ServerSearch,
)

FIRST_STEP = 1e-3  # relative; doubled with every proof
PRECISION = 1e-4  # relative width at which the bisection stops
SCHEDULE_SECONDS = 2.0  # for the schedule of one relaxed plan


@dataclass(frozen=True, slots=True)
class _Node:
    """The relaxation with fewer stages and places; those from layer ``fixed`` on are fixed."""

    form: ServerRelaxation
    fixed: int


@dataclass
class ServerTree:
    """The tree of one search over split stages; ``on_plan`` receives its relaxed plans."""

    search: ServerSearch
    on_plan: OnPlan
    scheduled: dict[tuple[RelaxedStage, ...], float] = field(default_factory=dict)

    def raised(self, low: float, most: float, until: float) -> float:
        """The largest time from ``low``, which is proved, to ``most`` that is proved too short."""
        step, failed = FIRST_STEP, float("inf")
        while low < most and failed > low * (1 + PRECISION) and monotonic() < until:
            target = min(most, low * (1 + step), (low + failed) / 2)
            if self.proves(target, until):
                low, step = target, 2 * step
            else:
                failed = target
        return low

    def proves(self, seconds: float, until: float) -> bool:
        """Whether no relaxed plan takes less than ``seconds``; False if not known in time."""
        nodes = [_Node(self.search.form, len(self.search.form.parameters) - 1)]
        while nodes:
            if monotonic() >= until:
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
            free = [stage for stage in plan if stage.stop <= node.fixed]
            if free:
                nodes += _branches(node, free[-1])
            elif self._schedule(plan, seconds, until) < seconds * (1 - MARGIN):
                return False
        return True

    def _schedule(self, plan: tuple[RelaxedStage, ...], seconds: float, until: float) -> float:
        """A bound on the schedules of a relaxed plan, improved until ``seconds``."""
        problem = relaxed_schedule(self.search.form, plan)
        if plan not in self.scheduled:
            self.scheduled[plan] = max(one.seconds for one in schedule_bounds(problem))
            if self.scheduled[plan] < seconds:
                left = max(0.0, min(SCHEDULE_SECONDS, until - monotonic()))
                solved = solve_schedule(problem, "optimal", Limits(seconds=left))
                self.scheduled[plan] = max(self.scheduled[plan], solved.bound)
        return self.scheduled[plan]


def _branches(node: _Node, stage: RelaxedStage) -> Iterator[_Node]:
    """Without the stage; with it at another place; with it at this place."""
    form, start, stop = node.form, stage.start, stage.stop
    at = choice_of(form, stage), start, stop
    without = form.limit.copy()
    without[at] = 0
    yield _Node(form._replace(limit=without), node.fixed)
    alone = form.limit.copy()
    alone[:, :stop, start + 1 :] = 0  # the stages that share a layer with it
    alone[at] = form.limit[at]
    others, here = form.places.copy(), form.places.copy()
    others[start] &= ~(1 << stage.place)
    here[start] = 1 << stage.place
    if others[start]:
        yield _Node(form._replace(limit=alone, places=others), node.fixed)
    yield _Node(form._replace(limit=alone, places=here), start)
