"""The portfolio: run every planner within the limit, then improve the best plan."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic

import numpy as np

from stagewright.formulations.checking.check import require_valid
from stagewright.formulations.forms.answers import Limits, OnProgress, Status
from stagewright.formulations.pipelines.bounds.server_relaxation import (
    SHARED_SERVERS,
    SPLIT_SERVERS,
)
from stagewright.formulations.pipelines.grouped_stages import scheduling_of
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, Predicted, Stage
from stagewright.formulations.plans.plan_class import DISJOINT_SPLIT, SHARED_SPLIT, SHARED_WHOLE
from stagewright.formulations.plans.starts import starts_of, timetable_of
from stagewright.solvers.pipelines.relaxation import FillAndDrain
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.pipelines.servers.relaxation import server_bound
from stagewright.solvers.planners.balanced import plan_balanced
from stagewright.solvers.planners.exact import improve_exactly
from stagewright.solvers.planners.general import plan_general
from stagewright.solvers.planners.grouped import plan_grouped
from stagewright.solvers.planners.published import plan_published
from stagewright.solvers.planners.replanning import replan
from stagewright.solvers.planners.servers import plan_servers
from stagewright.solvers.planners.spp import plan_spp
from stagewright.solvers.planners.steps import planner
from stagewright.solvers.planners.steps.proposal import (
    Attempt,
    Choices,
    MemoryMode,
    NoPlan,
    Proposal,
    class_of_proposal,
)
from stagewright.solvers.planners.structures.refine import refine
from stagewright.solvers.planners.structures.reordering import reorder
from stagewright.solvers.planners.structures.uniform import plan_uniformly

_PlanWithin = Callable[[Limits], Proposal | NoPlan]
_Step = tuple[str, _PlanWithin, Callable[[], bool], float]
"""A name, what plans, whether it is wanted, and its share of the time that is left."""

_MANY_DEVICES = 64  # with more, to check a plan may take longer than SPP
_GOOD_ENOUGH = 1e-6  # relative gap
_OF_GIVEN = 0.7, 0.3, 1.0  # most of a short limit; of a long one a share, and seconds
FULL = 0.5  # share of a device's memory above which recomputation may pay off
EQUAL = 1e-9  # relative; plans whose costs differ by less are equally good


def plan_auto(
    problem: PipelineProblem,
    limits: Limits,
    on_progress: OnProgress,
    choices: Choices | None = None,
) -> Proposal | NoPlan:
    """The best checked plan of the portfolio within ``limits.seconds``.

    A given plan is the first candidate. Then come balanced pipelines on equal groups of devices, so
    that there is a plan early, published schedules, and a search over stages that share groups of
    devices. What can only find plans of disjoint split stages is left out where a bound proves that
    these are slower: SPP, the relaxed plans of servers (the first few of them early, as they are
    often the best), a search on the stages of the best of these plans, and CP-SAT on its schedule.
    The rest is for the order of stages that share devices, a search over all finite plans, one on
    the stages and the order of its plan, a bound on the plans that share devices if that is best,
    and the exact joint planner. The order of the best plan is solved whenever it has new stages.
    """
    portfolio = _Portfolio(problem, limits, on_progress, choices=choices or Choices())
    if portfolio.choices.start is not None:
        most, share, seconds = _OF_GIVEN
        near = min(most * limits.seconds, share * limits.seconds + seconds)
        portfolio.consider("given", portfolio.begin, near)
        if portfolio.is_general():
            portfolio.consider("bound of given", portfolio.bound, portfolio.left() / 2)
    if portfolio.has_time():
        portfolio.consider("balanced", portfolio.balance, limits.seconds / 3)
    many = len(problem.cluster) > _MANY_DEVICES
    published: _Step = ("published", portfolio.publish, portfolio.has_time, 1 / 4)
    first: _Step = ("servers, at first", portfolio.pack, portfolio.is_open, 1 / 8)
    grouped: _Step = ("grouped", portfolio.group, portfolio.has_time, 1 / 4)
    spp: _Step = ("spp", portfolio.split, portfolio.is_unsettled, 1 / 3)
    for name, step, is_wanted, share in (
        *((spp, published, grouped) if many else (published, first, grouped, spp)),
        ("spp, recomputing", portfolio.recompute, portfolio.is_short_of_memory, 1 / 4),
        ("servers", portfolio.pack, portfolio.is_plain, 1 / 4),
        ("refined", portfolio.refine, portfolio.is_open, 1 / 8),
        ("cp-sat schedule", portfolio.reschedule, portfolio.is_open, 1 / 3),
        ("grouped, ordered", portfolio.order, portfolio.is_unordered, 1 / 3),
        ("bound", portfolio.bound, portfolio.is_general, 0.4),
        ("general", portfolio.search, portfolio.has_time, 0.6),
        ("general, refined", portfolio.climb, portfolio.is_general, 1 / 4),
        ("general, ordered", portfolio.order, portfolio.is_unordered, 1 / 3),
        ("bound, on", portfolio.bound, portfolio.is_general, 1 / 3),
        ("exact", portfolio.prove, portfolio.is_unsettled, 1.0),
        ("general, on", portfolio.search, portfolio.has_much_time, 0.8),
        ("ordered", portfolio.order, portfolio.is_unordered, 1.0),
    ):
        if is_wanted():
            portfolio.consider(name, step, portfolio.left() * share)
    return portfolio.answer()


@dataclass
class _Portfolio(planner.PlanSearch):
    """The best plan so far, and the attempts of all planners."""

    choices: Choices = field(kw_only=True)
    proposals: list[Proposal] = field(default_factory=list)
    fullest: float = 1.0
    plain: Proposal | None = None  # the best of disjoint split stages
    plain_cost: float = math.inf
    ordered: set[tuple[Stage, ...]] = field(default_factory=set)  # whose schedules were solved
    attempts: list[Attempt] = field(default_factory=list)
    refusals: dict[str, NoPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.relaxation = FillAndDrain(self.problem)
        self.predicted = self.checking = planner.checking_seconds(self.problem)

    def left(self) -> float:
        """The seconds left for a search whose plan is then checked."""
        # Twice: after the search and at the end, for which the predicted time is already left out.
        checks = 2 * self.checking - self.predicted
        return max(0.0, self.limits.left(monotonic() - self.began) - checks)

    def is_open(self) -> bool:
        """Whether there is a plan that time and bounds allow to improve."""
        return (
            self.best is not None
            and self.left() > 0
            and not self.relaxation.proves(self.cost * (1 - _GOOD_ENOUGH))
        )

    def consider(self, name: str, run: _PlanWithin, seconds: float) -> None:
        since = monotonic()
        limits = replace(self.limits, seconds=min(seconds, self.left()))
        answer = run(limits)
        spent = monotonic() - since
        for bound in answer.bounds:
            if bound.scope == "problem" and bound.plans.contains(DISJOINT_SPLIT):
                self.relaxation.low = max(self.relaxation.low, bound.seconds)
        if isinstance(answer, NoPlan):
            self.refusals[name] = answer
            status = Status.INFEASIBLE if answer.proved else Status.NO_ANSWER
            self.attempts.append(Attempt(name, status, None, spent, answer.reason))
            return
        predicted = self._checked(name, answer)
        cost = predicted.iteration_seconds
        known = self.best.notes if self.best else ()
        notes = "; ".join(note for note in answer.notes if note not in known)
        self.attempts.append(Attempt(name, Status.FEASIBLE, cost, spent, notes))
        # A bound on a class of plans is valid for any plan; one on schedules only for its stages.
        worse = answer
        fullest = _fullest_share(self.problem, predicted)
        self.proposals.append(answer)
        best = self.best
        if best is None or self._wins(answer, cost, fullest):
            worse, best, self.fullest = best or answer, answer, fullest
            self.keep(answer, cost)
        if cost < self.plain_cost and self._is_plain(answer):
            self.plain, self.plain_cost = answer, cost
        same = worse.stages == best.stages
        shared = [bound for bound in worse.bounds if same or bound.scope == "problem"]
        self.best = replace(best, bounds=tuple(dict.fromkeys([*best.bounds, *shared])))

    def _checked(self, name: str, answer: Proposal) -> Predicted:
        """The predictions of a valid plan; a slower check than predicted is noted."""
        since = monotonic()
        plan = assemble(self.problem, name, answer.stages, answer.starts)
        require_valid(self.problem, plan)
        self.checking = max(self.checking, monotonic() - since)
        assert plan.predicted is not None
        return plan.predicted

    def _wins(self, answer: Proposal, cost: float, fullest: float) -> bool:
        """Whether ``answer`` is faster; ties are broken by memory, then by the number of stages.

        A full tie replaces the best plan, as the same plan may have further bounds.
        """
        assert self.best is not None
        if abs(cost - self.cost) > EQUAL * self.cost:
            return cost < self.cost
        if abs(fullest - self.fullest) > EQUAL:
            return fullest < self.fullest
        return len(answer.stages) <= len(self.best.stages)

    def begin(self, limits: Limits) -> Proposal | NoPlan:
        """The given plan on the present devices, improved."""
        assert self.choices.start is not None
        return replan(self.problem, self.choices.start, self.choices, limits, self.on_progress)

    def balance(self, limits: Limits) -> Proposal | NoPlan:
        return plan_balanced(self.problem, limits, self.on_progress)

    def split(self, limits: Limits) -> Proposal | NoPlan:
        return plan_spp(self.problem, limits, self.on_progress)

    def pack(self, limits: Limits) -> Proposal | NoPlan:
        return plan_servers(self.problem, limits, self.on_progress)

    def climb(self, limits: Limits) -> Proposal | NoPlan:
        """A search on the stages of the best plan."""
        if self.best is None:
            return NoPlan("no plan to refine", proved=False)
        return refine(self.problem, self.best, limits, self.on_progress)

    def group(self, limits: Limits) -> Proposal | NoPlan:
        """A search over stages that share groups of devices."""
        return plan_grouped(self.problem, self.proposals, limits, self.on_progress)

    def reorder(self, limits: Limits) -> Proposal | NoPlan:
        """A better order of the computations of the best plan."""
        assert self.best is not None
        self.ordered.add(self.best.stages)
        return reorder(self.problem, self.best, limits, self.on_progress)

    def order(self, limits: Limits) -> Proposal | NoPlan:
        """A better order of the best plan, whose stages no other step has ordered."""
        run = self.reorder if self.cost < self.plain_cost else self.reschedule
        return run(limits)

    def bound(self, limits: Limits) -> Proposal | NoPlan:
        """The best plan, with a bound on plans that share devices if the plan shares devices."""
        assert self.best is not None
        plans = class_of_proposal(self.best)
        for known, name in ((SHARED_WHOLE, SHARED_SERVERS), (SHARED_SPLIT, SPLIT_SERVERS)):
            if known.contains(plans):
                seconds = server_bound(self.problem, self.cost, limits.seconds, known)
                found = Bound(seconds, name, "problem", known)
                return replace(self.best, bounds=(*self.best.bounds, found))
        return NoPlan("no relaxation of the class of this plan", proved=False)

    def is_general(self) -> bool:
        """Whether the best plan is not one of disjoint split stages."""
        return self.best is not None and self.cost < self.plain_cost and self.has_time()

    def is_plain(self) -> bool:
        """Whether the best plan is one of disjoint split stages, which bounds allow to improve."""
        return self.is_open() and self.cost >= self.plain_cost

    def is_unsettled(self) -> bool:
        """Whether the exact joint planner may find a better plan, or prove that there is none."""
        return self.is_open() or (self.best is None and self.has_time())

    def is_unordered(self) -> bool:
        """Whether the schedule of the best plan's stages was not solved yet."""
        return self.best is not None and self.best.stages not in self.ordered and self.has_time()

    def has_time(self) -> bool:
        return self.left() > 0

    def has_much_time(self) -> bool:
        """Whether the exact joint planner was skipped or ended early."""
        return self.best is not None and self.left() > self.limits.seconds / 20

    def is_short_of_memory(self) -> bool:
        """Whether recomputation is allowed and the best plan nearly fills some device's memory."""
        allowed = self.choices.recompute != "none" and self.has_time()
        return allowed and (self.best is None or self.fullest > FULL)

    def recompute(self, limits: Limits) -> Proposal | NoPlan:
        """SPP's plan with recomputation in every stage, as a start for the general search."""
        mode: MemoryMode = "layer" if self.choices.recompute == "layer" else "full"
        return plan_uniformly(plan_spp, self.problem, limits, self.on_progress, (mode,))

    def publish(self, limits: Limits) -> Proposal | NoPlan:
        """The best published schedule; with recomputation where memory is short."""
        modes = self.choices.any_mode.recomputations if self.is_short_of_memory() else ("none",)
        return plan_published(self.problem, self.cost, modes, limits, self.on_progress)

    def search(self, limits: Limits) -> Proposal | NoPlan:
        return plan_general(self.problem, limits, self.on_progress, self.choices, self.proposals)

    def refine(self, limits: Limits) -> Proposal | NoPlan:
        if self.plain is None:
            return NoPlan("only split stages on disjoint devices are refined", proved=False)
        return refine(self.problem, self.plain, limits, self.on_progress)

    def reschedule(self, limits: Limits) -> Proposal | NoPlan:
        if self.plain is None:
            return NoPlan("only split stages on disjoint devices are rescheduled", proved=False)
        scheduling = scheduling_of(self.problem, self.plain.stages)
        assert scheduling is not None
        self.ordered.add(self.plain.stages)
        known = timetable_of(self.plain.starts)
        solved = solve_schedule(scheduling, "optimal", limits, self.on_progress, known)
        assert solved.timetable is not None
        bound = Bound(solved.bound, solved.proved_by, "schedule", DISJOINT_SPLIT)
        starts = starts_of(self.problem, self.plain.stages, solved.timetable)
        return replace(self.plain, starts=starts, bounds=(*self.plain.bounds, bound))

    def prove(self, limits: Limits) -> Proposal | NoPlan:
        return improve_exactly(self.problem, self.plain, limits, self.on_progress)

    def _is_plain(self, answer: Proposal) -> bool:
        """Whether the plan has disjoint split stages and whole backwards."""
        whole = np.isnan(answer.starts[ActionKind.INPUT_GRADIENT]).all()
        return bool(whole) and scheduling_of(self.problem, answer.stages) is not None

    def answer(self) -> Proposal | NoPlan:
        attempts = tuple(self.attempts)
        if self.best is not None:
            return replace(self.best, attempts=attempts)
        # Only these two cover a class of plans; a baseline refuses only its own kind of plan.
        general = [self.refusals[name] for name in ("spp", "exact") if name in self.refusals]
        for refusal in general:
            if refusal.proved:
                return replace(refusal, attempts=attempts)
        bounds = tuple(bound for refusal in general for bound in refusal.bounds)
        return NoPlan(f"{self.limits.end} came before any plan was found", False, bounds, attempts)


def _fullest_share(problem: PipelineProblem, predicted: Predicted) -> float:
    """The largest share of its memory that a device needs at its peak."""
    index = problem.cluster.index
    return max(
        peak / float(problem.memory_bytes[index[name]])
        for name, peak in predicted.peak_memory_bytes.items()
    )


PLANNER = planner.SearchPlanner(
    "auto",
    "the best of several searches within the time limit, then its schedule improved by CP-SAT",
    "portfolio",
    plan_auto,
    planner.PlannerOptions(planner.ANY_RECOMPUTATION, offload=True, start=True),
)
