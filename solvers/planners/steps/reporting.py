"""Progress reports of a planner in terms of the whole problem."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any

from stagewright.formulations.checking.certificates import gap
from stagewright.formulations.forms.answers import GapStop, OnProgress, Progress, silent
from stagewright.formulations.patterns.one_f_one_b import (
    PATTERN_LOAD,
    PATTERN_MEMORY,
)
from stagewright.formulations.patterns.pattern_problems import load_seconds, memory_seconds
from stagewright.formulations.pipelines.bounds.every_plan import without_useless
from stagewright.formulations.pipelines.bounds.relaxation import FILL_AND_DRAIN, WIDE_FILL_AND_DRAIN
from stagewright.formulations.pipelines.bounds.server_relaxation import (
    SERVERS,
    SERVERS_AND_TURNS,
    SHARED_SERVERS,
    SPLIT_SERVERS,
)
from stagewright.formulations.pipelines.bounds.stages import schedule_bounds
from stagewright.formulations.pipelines.bounds.tensor_groups import (
    best_groups,
    of_groups,
    on_devices,
)
from stagewright.formulations.pipelines.grouped_stages import scheduling_of
from stagewright.formulations.plans.actions import WEIGHT_RULES
from stagewright.formulations.plans.assembly import assemble, assemble_pattern, certify
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, PipelinePlan, Stage
from stagewright.formulations.plans.plan_class import (
    DISJOINT_SPLIT,
    DISJOINT_WHOLE,
    EVERY_FINITE,
    EVERY_PLAN,
    SHARED_SPLIT,
    SHARED_WHOLE,
    PlanClass,
    class_of,
    patterns_under,
)
from stagewright.solvers.pipelines.every_plan import device_bounds, every_plan_bounds
from stagewright.solvers.pipelines.relaxation import FillAndDrain
from stagewright.solvers.pipelines.servers.relaxation import ServerBounds
from stagewright.solvers.planners.steps.planner import checking_seconds
from stagewright.solvers.planners.steps.proposal import (
    PeriodicProposal,
    Proposal,
    class_of_proposal,
    cost_of,
)

SHARE = 0.1  # of the time limit, for the passes of the relaxation; of the time so far, for one
_NEARER = 0.5  # of the gap, at most, has the other plan that an answer tells of
_SHORT = 0.03  # seconds for a bound that is reported early


class ClassBounds:
    """Bounds on every plan, and on smaller classes as far as they are asked for or reported.

    Every layer of the problem must fit in memory.
    """

    def __init__(self, problem: PipelineProblem, seconds: float = math.inf) -> None:
        self.problem = problem
        self.every = every_plan_bounds(problem)
        self._relaxed: tuple[tuple[PlanClass, str, FillAndDrain | ServerBounds], ...] = (
            (DISJOINT_SPLIT, FILL_AND_DRAIN, FillAndDrain(problem)),
            (DISJOINT_SPLIT, SERVERS, ServerBounds(problem)),
            (DISJOINT_WHOLE, WIDE_FILL_AND_DRAIN, FillAndDrain(problem, wide=True)),
            (DISJOINT_WHOLE, SERVERS_AND_TURNS, ServerBounds(problem, DISJOINT_WHOLE)),
            (SHARED_WHOLE, SHARED_SERVERS, ServerBounds(problem, SHARED_WHOLE)),
            (SHARED_SPLIT, SPLIT_SERVERS, ServerBounds(problem, SHARED_SPLIT)),
        )
        self._reported: dict[PlanClass, float] = {}
        self._share = seconds * SHARE
        self._until = monotonic() + seconds

    def report(self, bounds: Iterable[tuple[PlanClass, float]]) -> None:
        """Keep bounds that a search has proved."""
        for plans, seconds in bounds:
            self._reported[plans] = max(seconds, self._reported.get(plans, 0.0))

    def relaxed(self, plans: PlanClass, cost: float, most: float = math.inf) -> tuple[Bound, ...]:
        """The relaxations' bounds, at most ``cost``, on their smallest class with ``plans``.

        Passes for which no time is left are left out; each bound takes at most ``most`` seconds.
        """
        smallest = next((one for one, _, _ in self._relaxed if one.contains(plans)), None)
        found = []
        for known, name, relaxation in self._relaxed:
            if known == smallest:
                with self._spending() as seconds:
                    seconds = min(seconds, most)
                    found.append(Bound(relaxation.bound(cost, seconds), name, "problem", known))
        return tuple(found)

    def of_schedules(
        self, stages: Sequence[Stage], plans: PlanClass, cost: float
    ) -> tuple[Bound, ...]:
        """Bounds on the schedules of ``stages``, of which one in ``plans`` takes ``cost``."""
        with self._spending() as seconds:
            return device_bounds(self.problem, stages, plans, cost, seconds)

    def left(self) -> float:
        """The seconds to the time limit, negative after it."""
        return self._until - monotonic()

    @contextmanager
    def _spending(self) -> Iterator[float]:
        """The seconds that a bound may take: of the share that is left, and before the limit."""
        began = monotonic()
        yield max(0.0, min(self._share, self.left()))
        self._share -= monotonic() - began

    def best(self, plans: PlanClass, cost: float) -> float:
        """The best known bound on a class that contains ``plans``, at most ``cost``."""
        known = [(bound.plans, bound.seconds) for bound in self.every]
        known += [(one, relaxation.low) for one, _, relaxation in self._relaxed]
        known += self._reported.items()
        return min(cost, max(seconds for one, seconds in known if one.contains(plans)))


_MakePlan = Callable[[Any], PipelinePlan]


def reporting(
    bounds: ClassBounds,
    on_progress: OnProgress,
    periodic: bool,
    make_plan: _MakePlan,
    target: GapStop,
) -> OnProgress:
    """The callback for a planner's progress; it reports the initial bound at once."""
    if on_progress is silent and target.gap == 0:
        return silent
    reporter = Reporter(
        bounds, on_progress, make_plan, target, EVERY_PLAN if periodic else EVERY_FINITE
    )
    reporter.report()
    return reporter


@dataclass
class Reporter:
    """Reports the best plan so far, with the bound on its class, to ``on_progress``.

    A planner runs several searches in sequence, each with its own clock and its own best plan. The
    bound improves while the best plan stays in its class, and may fall when another class has a
    better plan. ``target`` is reached once the gap is small enough and the plan is checked.
    """

    bounds: ClassBounds
    on_progress: OnProgress
    make_plan: _MakePlan
    target: GapStop
    plans: PlanClass  # of the best plan; before there is one, of all that are searched
    began: float = field(default_factory=monotonic)
    cost: float = math.inf
    best: Callable[[], Any] | None = None
    best_cost: float = math.inf  # of ``best``; ``cost`` may be of a plan that is not at hand

    def __call__(self, step: Progress) -> None:
        """Update the best plan and the bounds from a planner's report and pass it on."""
        if step.plans is not None:
            self.bounds.report([(step.plans, step.bound)])
        if step.objective is not None:
            self.cost = min(self.cost, step.objective)
        better = self._keep(step)
        self.report()
        if better:
            self._tighten()

    def report(self) -> None:
        """Report the best plan and the bound."""
        cost = None if self.cost == math.inf else self.cost
        bound = self.bounds.best(self.plans, self.cost)
        plan = None if self.best is None else partial(self._plan, self.best)
        seconds = monotonic() - self.began
        self.on_progress(Progress(seconds, cost, bound, plan, self.plans))
        if not self.target.reached and self.best is not None:
            self._aim(self.best, self.bounds.best(self.plans, self.best_cost))

    def _tighten(self) -> None:
        """Report a better bound on the class of the best plan, if the relaxation has one."""
        known = self.bounds.best(self.plans, self.best_cost)
        most = max(_SHORT, SHARE * (monotonic() - self.began))  # the search waits meanwhile
        self.bounds.relaxed(self.plans, self.best_cost, most)
        if self.bounds.best(self.plans, self.best_cost) > known:
            self.report()

    def _keep(self, step: Progress) -> bool:
        """Keep the plan of a report, if it is at hand and none is better."""
        if step.best is None or step.objective is None or step.objective > self.best_cost:
            return False
        proposal = step.best()
        self.best, self.best_cost = step.best, step.objective
        self.plans = class_of_proposal(proposal)
        whole = [bound for bound in proposal.bounds if bound.scope == "problem"]
        self.bounds.report((bound.plans, bound.seconds) for bound in whole)
        return True

    def _aim(self, best: Callable[[], Any], bound: float) -> None:
        """Say that the gap is reached, after a check of the plan."""
        if self.target.gap > 0 and gap(self.best_cost, bound) <= self.target.gap:
            self._plan(best)
            self.target.reached = True

    def _plan(self, made: Callable[[], Any]) -> PipelinePlan:
        return self.make_plan(made())


def certified_plan(
    problem: PipelineProblem, planner: str, known: ClassBounds, answer: Proposal | PeriodicProposal
) -> PipelinePlan:
    """The certified plan of a proposal."""
    if isinstance(answer, PeriodicProposal):
        return _certified_pattern(problem, planner, known, answer)
    return certified_schedule(problem, planner, known, answer)


def with_other(
    problem: PipelineProblem,
    planner: str,
    known: ClassBounds,
    answer: Proposal | PeriodicProposal,
    best: PipelinePlan,
    asked: float,
) -> tuple[PipelinePlan, PipelinePlan | None]:
    """The plan of ``answer`` and another of its plans, which is the first if it has the asked gap.

    ``asked`` is 0 if no gap is.

    The other has the least gap, at most half of that of ``best``, the fastest; None: none has, or
    there is no time to check it.
    """
    if isinstance(answer, PeriodicProposal) or known.left() < checking_seconds(problem):
        return best, None
    assert best.certificate is not None
    other, least = None, _NEARER * best.certificate.gap
    whole = [bound for bound in answer.bounds if bound.scope == "problem"]
    for made in answer.others:
        cost, plans = cost_of(problem, made), class_of_proposal(made)
        bounds = [*known.every, *known.relaxed(plans, cost), *made.bounds, *whole]
        about = [one for one in bounds if one.scope == "problem" and one.plans.contains(plans)]
        its = gap(cost, max(one.seconds for one in about))
        if its <= least:
            other, least = replace(made, bounds=(*made.bounds, *whole)), its
    if other is None:
        return best, None
    nearer = certified_schedule(problem, planner, known, other)
    is_asked = asked > 0 and least <= asked < best.certificate.gap
    return (nearer, best) if is_asked else (best, nearer)


def _certified_pattern(
    problem: PipelineProblem, planner: str, known: ClassBounds, proposal: PeriodicProposal
) -> PipelinePlan:
    rule = WEIGHT_RULES[proposal.weights]
    assembled = assemble_pattern(problem, planner, proposal.stages, proposal.pattern, rule)
    offload = any(stage.offload for stage in proposal.stages)
    plans = replace(patterns_under(rule), offload=offload)
    load = load_seconds(problem, proposal.stages, rule)
    # The solver's patterns leave more time for offloading than the checker asks for.
    proved = [one for one in proposal.bounds if not offload or one.scope == "problem"]
    bounds = [*known.every, *proved, Bound(load, PATTERN_LOAD, "schedule", plans)]
    if not offload:
        least = memory_seconds(problem, proposal.stages, rule)
        bounds.append(Bound(least, PATTERN_MEMORY, "schedule", plans))
    return certify(problem, assembled, bounds, ())


def certified_schedule(
    problem: PipelineProblem, planner: str, known: ClassBounds, proposal: Proposal
) -> PipelinePlan:
    """The certified plan of a finite schedule."""
    rule = WEIGHT_RULES[proposal.weights]
    assembled = assemble(
        problem, planner, proposal.stages, proposal.starts, rule, proposal.begins, proposal.sub_ends
    )
    assert assembled.predicted is not None
    cost, plans = assembled.predicted.iteration_seconds, class_of(assembled)
    bounds = [
        *known.every,
        *known.relaxed(plans, cost),
        *proposal.bounds,
        *known.of_schedules(proposal.stages, plans, cost),
    ]
    scheduling = scheduling_of(problem, proposal.stages)
    if scheduling is not None:
        bounds += schedule_bounds(scheduling)
    return certify(problem, assembled, bounds, proposal.guarantees)


def with_certificate(problem: PipelineProblem, plan: PipelinePlan, seconds: float) -> PipelinePlan:
    """A valid plan with bounds on plans of its tensor degree, computed for ``seconds``.

    The plan as it is, without a certificate, if no bound speaks of it: of shards, several degrees,
    groups of devices that overlap, or weights that change within the iteration.
    """
    plans = class_of(plan)
    degree = plans.degree
    inner = None if degree is None else of_groups(plans, degree)
    if degree is None or inner is None:
        return plan
    assert plan.predicted is not None
    groups = without_useless(problem if degree == 1 else best_groups(problem, degree))
    known = ClassBounds(groups, seconds)
    bounds = (*known.every, *known.relaxed(inner, plan.predicted.iteration_seconds))
    own = [found for one in bounds if (found := on_devices(one, degree)) is not None]
    return certify(problem, plan, own, ())
