"""The best bound of all server-aware relaxations of a problem.

Branch and bound on relaxed plans, which can only raise the bound of a label search.

A node fixes the last stages, and says which stages are not possible before them. The search over
labels either proves that no plan of the node is in time, or returns a relaxed plan, on whose last
free stage the node branches. If all stages are fixed, their schedule at the nearest places may be
too long; otherwise places are fixed in the same way, and then the schedule decides. The more stages
are fixed, the more exactly the search knows the round trip behind a stage.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from time import monotonic

from stagewright.formulations.forms.answers import Limits, StopToken, is_stopped
from stagewright.formulations.pipelines.bounds.relaxation import (
    choice_of,
    nearest,
    relaxed_schedule,
)
from stagewright.formulations.pipelines.bounds.server_relaxation import (
    Levels,
    RelaxedStage,
    ServerRelaxation,
    server_relaxations,
)
from stagewright.formulations.pipelines.bounds.stages import schedule_bounds
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT, PlanClass
from stagewright.solvers.pipelines.relaxation import relaxed_load_bound
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.pipelines.servers.search import (
    FEW_LABELS,
    MOST_LABELS,
    STEPS_PER_SECOND,
    OnPlan,
    ServerSearch,
)

FIRST_STEP = 1e-3  # relative; doubled with every proof
_SCHEDULE_SECONDS = 2.0  # for the schedule of one relaxed plan


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
            left = max(0.0, min(_SCHEDULE_SECONDS, until - monotonic()))
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


_OnRelaxed = Callable[[Levels, tuple[RelaxedStage, ...]], None]


def server_bound(
    problem: PipelineProblem, incumbent: float, seconds: float, plans: PlanClass = DISJOINT_SPLIT
) -> float:
    """A lower bound on all ``plans``, at most ``incumbent`` (any known time).

    After about ``seconds`` the best bound so far is returned.
    """
    return ServerBounds(problem, plans).bound(incumbent, seconds)


def is_server_bound(
    problem: PipelineProblem, seconds: float, plans: PlanClass = DISJOINT_SPLIT
) -> bool:
    """Whether some relaxation proves that no plan of the class takes less than ``seconds``."""
    return ServerBounds(problem, plans).proves(seconds)


def _finer(searches: Sequence[tuple[Levels, ServerSearch]]) -> list[tuple[Levels, ServerSearch]]:
    every = ((level, one.finer()) for level, one in searches)
    return [(level, one) for level, one in every if one is not None]


@dataclass
class ServerBounds:
    """The best bound of all relaxations of a problem whose tables are small enough.

    ``low`` is proved; it rises with every question.
    """

    problem: PipelineProblem
    plans: PlanClass = DISJOINT_SPLIT
    low: float = field(init=False)

    def __post_init__(self) -> None:
        self.low = relaxed_load_bound(self.problem, self.plans.split_backward)

    @cached_property
    def searches(self) -> tuple[tuple[Levels, "ServerSearch"], ...]:
        """The searches, each with its links."""
        forms = server_relaxations(self.problem, self.plans)
        most = MOST_LABELS if self.plans.sharing == "none" else FEW_LABELS
        every = ((level, ServerSearch(form, most_labels=most)) for level, form in forms)
        return tuple((level, one) for level, one in every if one.is_small)

    def bound(
        self, incumbent: float, seconds: float = math.inf, on_relaxed: _OnRelaxed = lambda *_: None
    ) -> float:
        """As :func:`server_bound`; ``on_relaxed`` receives the relaxed plans that are found."""
        until = monotonic() + seconds
        searches = list(self.searches)
        while searches and monotonic() < until:
            for level, one in searches:
                self.low = one.raised(self.low, incumbent, until, partial(on_relaxed, level))
            searches = _finer(searches) if self.low < incumbent else []
        return min(self.low, incumbent)

    def proves(self, seconds: float) -> bool:
        """Whether no plan takes less than ``seconds``."""
        searches = list(self.searches)
        while searches and seconds > self.low:
            if any(one.proves(seconds) for _, one in searches):
                self.low = seconds
            searches = _finer(searches)
        return seconds <= self.low

    def branch(
        self,
        incumbent: float,
        seconds: float,
        on_relaxed: _OnRelaxed = lambda *_: None,
        stop: StopToken | None = None,
    ) -> float:
        """As :meth:`bound`, and then by branch and bound on the plans of split stages."""
        until = monotonic() + seconds
        self.bound(incumbent, seconds / 2, on_relaxed)
        for i, (level, one) in enumerate(self.searches):
            share = (until - monotonic()) / (len(self.searches) - i)
            tree = ServerTree(one, partial(on_relaxed, level), stop)
            self.low = tree.raised(self.low, incumbent, monotonic() + share)
        return min(self.low, incumbent)

    def proves_by_branching(self, seconds: float, limit: float) -> bool:
        """Whether branch and bound proves that no plan takes less than ``seconds``.

        False if it is not known after ``limit`` seconds.
        """
        until = monotonic() + limit
        trees = [ServerTree(one, lambda _: None) for _, one in self.searches]
        if any(tree.proves(seconds, until) for tree in trees if seconds > self.low):
            self.low = seconds
        return seconds <= self.low

    def near(
        self, seconds: float, steps: float
    ) -> Iterator[tuple[Levels, tuple[RelaxedStage, ...]]]:
        """Relaxed plans of less than ``seconds``, each after at most ``steps``."""
        for level, one in self.searches:
            found = one.answer(seconds, steps)
            if found.plan:
                yield level, found.plan
