"""The portfolio: run every planner within the limit, then improve the best plan."""

import math
from dataclasses import dataclass, field, replace
from time import monotonic, process_time

import numpy as np

from stagewright.formulations.checking.check import require_valid
from stagewright.formulations.forms.answers import Limits, OnProgress, Status
from stagewright.formulations.pipelines.bounds.server_relaxation import (
    SHARED_SERVERS,
    SPLIT_SERVERS,
)
from stagewright.formulations.pipelines.grouped_stages import scheduling_of
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.assembly import assemble, starts_of, timetable_of
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, Predicted
from stagewright.formulations.plans.plan_class import (
    DISJOINT_SPLIT,
    SHARED_SPLIT,
    SHARED_WHOLE,
    PlanClass,
)
from stagewright.solvers.pipelines.relaxation import FillAndDrain
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.pipelines.servers.relaxation import ServerBounds
from stagewright.solvers.planners.balanced import plan_balanced
from stagewright.solvers.planners.exact import improve_exactly
from stagewright.solvers.planners.general import StructureSearch
from stagewright.solvers.planners.grouped import GroupedSearch
from stagewright.solvers.planners.published import PublishedSearch
from stagewright.solvers.planners.replanning import replan
from stagewright.solvers.planners.servers import PackingSearch
from stagewright.solvers.planners.spp import plan_spp
from stagewright.solvers.planners.steps import planner
from stagewright.solvers.planners.steps.members import (
    Member,
    PlanWithin,
    member_of,
    promises_of,
)
from stagewright.solvers.planners.steps.proposal import (
    Attempt,
    Choices,
    NoPlan,
    Proposal,
    class_of_proposal,
    cost_of,
    fullest_share,
)
from stagewright.solvers.planners.structures.reordering import reorder

_GOOD_ENOUGH = 1e-6  # relative gap
FULL = 0.5  # share of a device's memory above which recomputation may pay off
EQUAL = 1e-9  # relative; plans whose costs differ by less are equally good
_SLOWER = 0.02  # by which plans of other classes may be slower, that are told of beside the best
_OF_GIVEN = 0.7, 0.3, 1.0  # most of a short limit; of a long one a share, and seconds
_ENDED = 0.5  # share of its turn; a search that used less has ended by itself
_LEAST = 1e-3  # CPU seconds; less is not divided by


def plan_auto(
    problem: PipelineProblem,
    limits: Limits,
    on_progress: OnProgress,
    choices: Choices | None = None,
) -> Proposal | NoPlan:
    """The best checked plan of the portfolio within ``limits.seconds``.

    A given plan is the first candidate, then balanced pipelines on equal groups of devices, so that
    there is a plan early. All other members search in turns: published schedules, stages that share
    groups of devices, servers, SPP, all finite plans, the order of the best plan's computations, a
    bound on its class, and the exact joint planner. What can only find plans of disjoint split
    stages is left out where a bound proves that these are slower.

    A turn is measured in CPU seconds, so that the plan depends little on what else the machine
    does. It is as long as all turns of the member before it. The next turn is that of the member
    with the most expected gain per second (:meth:`.Member.expected`). A search that has ended by
    itself is asked again only if it begins with the best plan and there is another one.
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
    portfolio.promise()
    while (member := portfolio.next()) is not None:
        portfolio.take_turn(member)
    return portfolio.answer()


@dataclass
class _Portfolio(planner.PlanSearch):
    """The members, the best plan so far, and the attempts of all planners."""

    choices: Choices = field(kw_only=True)
    proposals: dict[str, Proposal] = field(default_factory=dict)  # the last one of each member
    of_class: dict[PlanClass, tuple[float, Proposal]] = field(default_factory=dict)  # the best
    fullest: float = 1.0
    plain: Proposal | None = None  # the best of disjoint split stages
    plain_cost: float = math.inf
    attempts: dict[str, Attempt] = field(default_factory=dict)
    refusals: dict[str, NoPlan] = field(default_factory=dict)
    cpu_began: float = field(default_factory=process_time)

    def __post_init__(self) -> None:
        self.relaxation = FillAndDrain(self.problem)
        self.predicted = self.checking = planner.checking_seconds(self.problem)
        given = self.problem, self.limits, self.on_progress
        self.structures = StructureSearch(*given, self.choices.any_mode)
        self.schedules = PublishedSearch(*given)
        self.groups = GroupedSearch(*given)
        self.groups.balanced = self.structures.balanced  # made once
        self.packing = PackingSearch(*given)
        self.relaxations: dict[PlanClass, ServerBounds] = {}
        self.members = tuple(
            member_of(name, run, is_wanted, follows, len(self.problem.cluster))
            for name, run, is_wanted, follows in (
                ("published", self.publish, self.has_time, False),
                ("servers", self.packing.run, self.is_open, False),
                ("grouped", self.group, self.has_time, True),
                ("general", self.search, self.has_time, True),
                ("spp", self.split, self.is_unsettled, False),
                ("bound", self.bound, self.is_general, True),
                ("ordered", self.order, self.has_plan, True),
                ("exact", self.prove, self.is_unsettled, False),
            )
        )

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

    def promise(self) -> None:
        """Tell the members what is expected of them."""
        promises = promises_of(self.problem, self.best is not None)
        for member in self.members:
            member.promise = promises[member.name]

    def next(self) -> Member | None:
        """The member whose turn is next; None at the end."""
        if self.cost <= self.structures.enough * (1 + _GOOD_ENOUGH):
            return None  # no finite plan is faster
        wanted = [one for one in self.members if not one.is_over(self.cost) and one.is_wanted()]
        return max(wanted, key=Member.expected, default=None)

    def low(self) -> float:
        """The best bound on the class of the best plan that members have proved."""
        if self.best is None:
            return self.structures.enough
        plans = class_of_proposal(self.best)
        known = [one for one in self.best.bounds if one.scope == "problem"]
        return max(
            (one.seconds for one in known if one.plans.contains(plans)),
            default=self.structures.enough,
        )

    def take_turn(self, member: Member) -> None:
        """Let a member search for as long as all its turns before, and note its gain."""
        cost, low, cpu = self.cost, self.low(), process_time()
        turn = max(member.spent, member.first + self.predicted)
        seconds = min(turn * self._seconds_per_cpu_second(), self.left())
        since = monotonic()
        self.consider(member.name, member.run, seconds)
        is_over = monotonic() - since < _ENDED * seconds
        spent = process_time() - cpu
        member.spent += spent
        member.ended = self.cost if is_over else None
        member.gain = self._gain(cost, low) / max(spent, _LEAST)

    def _gain(self, cost: float, low: float) -> float:
        """The relative gain since there were a cost and a bound: 1 for the first plan."""
        if math.isinf(cost) or cost == 0:
            return float(self.cost < cost)
        return 1 - self.cost / cost + max(0.0, self.low() - low) / cost

    def _seconds_per_cpu_second(self) -> float:
        """Wall seconds that a CPU second of this process has taken so far."""
        wall, cpu = monotonic() - self.began, process_time() - self.cpu_began
        return max(1.0, wall / cpu) if cpu > _LEAST else 1.0

    def consider(self, name: str, run: PlanWithin, seconds: float) -> None:
        """Run a search for at most ``seconds``, and keep its plan if it is the best."""
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
            self._note(Attempt(name, status, None, spent, answer.reason))
            return
        cost = cost_of(self.problem, answer)
        notes = [note for note in answer.notes if not self.best or note not in self.best.notes]
        self._note(Attempt(name, Status.FEASIBLE, cost, spent, "; ".join(notes)))
        self.proposals[name] = answer
        plans = class_of_proposal(answer)
        if cost < self.of_class.get(plans, (math.inf, answer))[0]:
            self.of_class[plans] = cost, answer
        if cost < self.plain_cost and self._is_plain(answer):
            self.plain, self.plain_cost = answer, cost
        # A bound on a class of plans is valid for any plan; one on schedules only for its stages.
        worse, best = answer, self.best
        if best is None or self._may_win(answer, cost):
            predicted = self._checked(name, answer)
            fullest = fullest_share(self.problem, predicted)
            if best is None or self._wins(answer, cost, fullest):
                worse, best, self.fullest = best or answer, answer, fullest
                self.keep(answer, cost)
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

    def _may_win(self, answer: Proposal, cost: float) -> bool:
        """Whether ``answer`` has to be compared with the best plan, which needs a check."""
        assert self.best is not None
        same = answer.stages == self.best.stages and cost == self.cost
        return cost <= self.cost * (1 + EQUAL) and not same

    def _wins(self, answer: Proposal, cost: float, fullest: float) -> bool:
        """Whether ``answer`` is faster; ties are broken by memory, then by the number of stages."""
        assert self.best is not None
        if abs(cost - self.cost) > EQUAL * self.cost:
            return cost < self.cost
        if abs(fullest - self.fullest) > EQUAL:
            return fullest < self.fullest
        return len(answer.stages) < len(self.best.stages)

    def _note(self, one: Attempt) -> None:
        """Keep the last answer of a member, with its best cost and the seconds of all its turns."""
        before = self.attempts.get(one.planner)
        if before is not None:
            costs = [cost for cost in (before.cost_seconds, one.cost_seconds) if cost is not None]
            one = replace(
                before if one.cost_seconds is None else one,
                cost_seconds=min(costs, default=None),
                wall_seconds=before.wall_seconds + one.wall_seconds,
            )
        self.attempts[one.planner] = one

    def begin(self, limits: Limits) -> Proposal | NoPlan:
        """The given plan on the present devices, improved."""
        assert self.choices.start is not None
        return replan(self.problem, self.choices.start, self.choices, limits, self.on_progress)

    def balance(self, limits: Limits) -> Proposal | NoPlan:
        return plan_balanced(self.problem, limits, self.on_progress)

    def split(self, limits: Limits) -> Proposal | NoPlan:
        return plan_spp(self.problem, limits, self.on_progress)

    def order(self, limits: Limits) -> Proposal | NoPlan:
        """A better order of the computations of the best plan."""
        assert self.best is not None
        if self.cost < self.plain_cost:
            return reorder(self.problem, self.best, limits, self.on_progress)
        return self.reschedule(limits)

    def bound(self, limits: Limits) -> Proposal | NoPlan:
        """The best plan, with a bound on plans that share devices if the plan shares devices."""
        assert self.best is not None
        plans = class_of_proposal(self.best)
        for known, name in ((SHARED_WHOLE, SHARED_SERVERS), (SHARED_SPLIT, SPLIT_SERVERS)):
            if known.contains(plans):
                if known not in self.relaxations:
                    self.relaxations[known] = ServerBounds(self.problem, known)
                seconds = self.relaxations[known].bound(self.cost, limits.seconds)
                found = Bound(seconds, name, "problem", known)
                return replace(self.best, bounds=(*self.best.bounds, found))
        return NoPlan("no relaxation of the class of this plan", proved=False)

    def is_general(self) -> bool:
        """Whether the best plan is not one of disjoint split stages."""
        return self.best is not None and self.cost < self.plain_cost and self.has_time()

    def is_unsettled(self) -> bool:
        """Whether the exact joint planner may find a better plan, or prove that there is none."""
        return self.is_open() or (self.best is None and self.has_time())

    def has_time(self) -> bool:
        return self.left() > 0

    def has_plan(self) -> bool:
        return self.best is not None and self.has_time()

    def publish(self, limits: Limits) -> Proposal | NoPlan:
        """The best published schedule; with recomputation where memory is short."""
        is_short = self.best is None or self.fullest > FULL
        modes = self.choices.any_mode.recomputations if is_short else ("none",)
        return self.schedules.run(self.cost, modes, limits)

    def group(self, limits: Limits) -> Proposal | NoPlan:
        """A search over stages that share groups of devices."""
        return self.groups.run(self.known(), limits)

    def search(self, limits: Limits) -> Proposal | NoPlan:
        return self.structures.run(self.known(), limits)

    def known(self) -> list[Proposal]:
        """The plans that other searches begin with: the last one of each member and the best."""
        return [*self.proposals.values(), *([self.best] if self.best else [])]

    def reschedule(self, limits: Limits) -> Proposal | NoPlan:
        """A better schedule of the best plan of disjoint split stages."""
        assert self.plain is not None
        scheduling = scheduling_of(self.problem, self.plain.stages)
        assert scheduling is not None
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
        attempts = tuple(self.attempts.values())
        if self.best is not None:
            plans, most = class_of_proposal(self.best), self.cost * (1 + _SLOWER)
            others = (
                other
                for its, (cost, other) in self.of_class.items()
                if its != plans and cost <= most
            )
            return replace(self.best, attempts=attempts, others=tuple(others))
        # Only these two cover a class of plans; a baseline refuses only its own kind of plan.
        general = [self.refusals[name] for name in ("spp", "exact") if name in self.refusals]
        for refusal in general:
            if refusal.proved:
                return replace(refusal, attempts=attempts)
        bounds = tuple(bound for refusal in general for bound in refusal.bounds)
        return NoPlan(f"{self.limits.end} came before any plan was found", False, bounds, attempts)


PLANNER = planner.SearchPlanner(
    "auto",
    "the best of several searches within the time limit, then its schedule improved by CP-SAT",
    "portfolio",
    plan_auto,
    planner.PlannerOptions(planner.ANY_RECOMPUTATION, offload=True, start=True),
)
