"""Entry point of all planners: run one or the portfolio, then assemble, check and certify."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

from stagewright.formulations.checking.certificates import best_of
from stagewright.formulations.forms.answers import (
    GapStop,
    Limits,
    OnProgress,
    Status,
    settled,
    silent,
)
from stagewright.formulations.pipelines.bounds.every_plan import why_nothing_fits
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.plan_class import EVERY_PLAN, PlanClass
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.pipelines.every_plan import every_plan_bounds
from stagewright.solvers.planners import (
    auto,
    exact,
    general,
    launchable,
    ooo,
    order,
    parallel_pipelines,
    servers,
    spp,
)
from stagewright.solvers.planners.baselines import hetpipe, pipedream
from stagewright.solvers.planners.periodic import asynchronous, madpipe, one_f_one_b_star
from stagewright.solvers.planners.periodic.search import require_periodic
from stagewright.solvers.planners.steps.canonical import canonical_forms, proposed
from stagewright.solvers.planners.steps.planner import (
    Planner,
    checking_seconds,
    require_honoured,
    require_host_links,
)
from stagewright.solvers.planners.steps.proposal import (
    Attempt,
    Choices,
    NoPlan,
    PeriodicProposal,
    Proposal,
)
from stagewright.solvers.planners.steps.reporting import (
    ClassBounds,
    certified_plan,
    certified_schedule,
    reporting,
    with_other,
)
from stagewright.solvers.planners.steps.sharded import note_on_shards, sharded, smaller_states
from stagewright.solvers.planners.steps.warm_start import require_same_layers
from stagewright.solvers.planners.steps.warm_up import FirstPlan, compile_kernels

OPTIMAL_GAP = 1e-6  # relative gap of an optimal plan; rounding of ticks and sums is below it
_CERTIFYING = 0.04  # of the time limit, for bounds on the class and the schedules of the answer

PLANNERS: dict[str, Planner] = {
    one.name: one
    for one in (
        spp.PLANNER,
        exact.PLANNER,
        pipedream.DP,
        pipedream.GPIPE,
        pipedream.PLANNER,
        hetpipe.PLANNER,
        one_f_one_b_star.PLANNER,
        madpipe.PLANNER,
        asynchronous.PLANNER,
        parallel_pipelines.TWO_BUFFERED,
        parallel_pipelines.FLUSHED,
        servers.PLANNER,
        general.PLANNER,
        order.PLANNER,
        launchable.PLANNER,
        ooo.PLANNER,
        auto.PLANNER,
    )
}


NEEDS: dict[str, Callable[[PipelineProblem, Choices], None]] = {
    **dict.fromkeys((one_f_one_b_star.PLANNER.name, madpipe.PLANNER.name), require_periodic),
    asynchronous.PLANNER.name: asynchronous.require_work,
    **dict.fromkeys(parallel_pipelines.RULES, parallel_pipelines.require_width),
    order.PLANNER.name: order.require_order,
    ooo.PLANNER.name: ooo.require_out_of_order,
}
"""What some planners refuse of a problem before they search, and again themselves."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """The cost of restricting plans to what a framework runs: bound, gap, best free plan.

    ``bound`` is a lower bound in seconds on every plan of the class ``plans``, which has all that
    the framework ``name`` runs, and ``gap`` is the answer's to it; None without a plan, or if no
    bound is about the answer. With ``Result.sizes`` they are about what the framework runs in all
    of these, and ``plans`` about the answer's size. ``free_cost`` is that of the best plan found of
    any kind.
    """

    name: str
    plans: PlanClass
    bound: float | None
    gap: float | None
    proved_by: str | None
    free_cost: float | None


@dataclass(frozen=True, slots=True)
class SizeResult:
    """The result for a batch in ``microbatches`` of ``samples`` each; seconds, or None."""

    samples: int
    microbatches: int
    status: Status
    cost: float | None
    bound: float | None


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a planning problem.

    ``cost`` is the iteration in seconds, ``bound`` a lower bound on every plan of the class
    ``plans``, and ``gap`` is (cost - bound) / cost; ``seconds`` is the wall time. If infeasible,
    ``plans`` is the class that has no plan, None if only the planner's own kind of plan was
    searched. ``reason`` says why there is no plan, or has notes of the planner; ``attempts`` are
    the results of the planners of a portfolio. ``ended`` says that planning ended at the requested
    gap, else it is empty. ``restriction`` is there if the plan is for a framework. ``other`` is a
    plan of another class that a portfolio also holds, if it is at most 2 % slower and has at most
    half the gap; or the fastest plan, if ``plan`` is such a one and has the requested gap.
    With ``sizes`` the plan is the best found for a batch in microbatches of these, and the bound
    and the status are about all of them; its certificate is about its own size alone.
    """

    status: Status
    planner: str
    plan: PipelinePlan | None
    cost: float | None
    bound: float | None
    gap: float | None
    proved_by: str | None
    seconds: float
    reason: str = ""
    attempts: tuple[Attempt, ...] = ()
    plans: PlanClass | None = None
    ended: str = ""
    restriction: Restriction | None = None
    sizes: tuple[SizeResult, ...] = ()
    other: PipelinePlan | None = None

    @property
    def optimal_among(self) -> str | None:
        """The class of plans among which the plan is proved optimal; None without a proof."""
        if self.status is not Status.OPTIMAL or self.plan is None or self.plans is None:
            return None
        if self.restriction is not None:
            return str(self.restriction.plans)
        proof = self.plan.certificate
        if proof is not None and proof.gap > OPTIMAL_GAP:
            return proof.schedule_plans.schedule_phrase()
        return str(self.plans)


def plan(
    problem: PipelineProblem,
    planner: str = "auto",
    limits: Limits | None = None,
    on_progress: OnProgress = silent,
    choices: Choices | None = None,
) -> Result:
    """Plan ``problem``; infeasible, out of time and interrupted are statuses, not errors.

    ``auto`` with an order to plan runs the planner ``order``, for a runtime ``launchable``.

    ``on_progress`` receives the iteration of the best plan, the best bound so far on its class of
    plans, and a function that returns the plan.

    The first use on a machine compiles the planner's kernels, which does not count towards the
    limit: ``on_progress`` is told of each, and of a plan of ``auto`` before the first. A stop ends
    that, too.

    Raises
    ------
    InputError
        If ``planner`` is not one of PLANNERS, or does not support ``choices``, or the requested
        period is below the load bound, or the plan to start from has other layers.
    """
    asked, limits = choices or Choices(), limits or Limits()
    if asked.shards != "none":
        plain = replace(asked, shards="none")
        result = plan(problem, planner, limits, on_progress, plain)
        return _with_shards(problem, limits, asked, result)
    proposer = able_planner(problem, planner, asked)
    planner = proposer.name
    target = GapStop(limits.gap, limits.stop)
    first = _first_plan(problem, proposer, on_progress, target)
    if not compile_kernels(planner, first, target) or target.reached:
        return _stopped(problem, proposer, first, limits)
    began = monotonic()
    note = ""
    if asked.batch is not None:
        planned = parallel_pipelines.of_batch(problem, planner, asked, limits)
        if isinstance(planned, NoPlan):
            return _refused(problem, planner, planned, limits, monotonic() - began)
        (problem, note), asked = planned, replace(asked, batch=None)
    reason = why_nothing_fits(problem)
    if reason is not None:
        nothing = NoPlan(reason, plans=EVERY_PLAN)
        return _refused(problem, planner, nothing, limits, monotonic() - began)
    forms = canonical_forms(problem, proposer)
    known = ClassBounds(forms.bounded, limits.seconds)
    make_plan = partial(certified_plan, problem, planner, known)
    report = reporting(known, on_progress, proposer.options.period_seconds, make_plan, target)
    searched = _search_limits(forms.whole, limits, target, began)
    answer = proposed(proposer, forms, asked, searched, report)
    if isinstance(answer, NoPlan):
        if answer.proved or first.proposal is None:
            return _refused(problem, planner, answer, limits, monotonic() - began)
        answer = replace(first.proposal, attempts=answer.attempts)
    answer = replace(answer, notes=(*filter(None, (note,)), *answer.notes))
    certified = make_plan(answer)
    certified, other = with_other(problem, planner, known, answer, certified, limits.gap)
    return replace(_answered(proposer, answer, certified, limits, began), other=other)


def require_planner(name: str) -> None:
    """Refuse a name that is none of PLANNERS."""
    if name not in PLANNERS:
        raise InputError(f"unknown planner {name!r}; there are {', '.join(PLANNERS)}")


def able_planner(problem: PipelineProblem, planner: str, choices: Choices) -> Planner:
    """The planner that :func:`plan` asks; nothing is compiled or searched for.

    Raises
    ------
    InputError
        If ``planner`` is not one of PLANNERS, or does not support ``choices``, or lacks what it
        needs, or the plan to start from has other layers.
    """
    asked = replace(choices, shards="none")  # which are added to any planner's plan
    if asked.order is not None and planner == auto.PLANNER.name:
        planner = order.PLANNER.name
    if asked.runtime is not None and planner == auto.PLANNER.name:
        planner = launchable.PLANNER.name
    require_planner(planner)
    require_honoured(PLANNERS[planner], asked, PLANNERS.values())
    if asked.offload:
        require_host_links(problem)
    if asked.start is not None:
        require_same_layers(problem.chain, asked.start)
    if planner in NEEDS:
        NEEDS[planner](problem, asked)
    return PLANNERS[planner]


def _first_plan(
    problem: PipelineProblem, planner: Planner, on_progress: OnProgress, target: GapStop
) -> FirstPlan:
    """The portfolio's plan while kernels are compiled; its bounds need none."""
    if planner.name != auto.PLANNER.name:
        return FirstPlan(problem, on_progress, target, None)
    forms = canonical_forms(problem, planner)

    def certified(made: Proposal) -> PipelinePlan:
        bounds = ClassBounds(forms.bounded, seconds=0.0)
        return certified_schedule(problem, planner.name, bounds, made)

    return FirstPlan(forms.able, on_progress, target, certified)


def _stopped(
    problem: PipelineProblem, planner: Planner, first: FirstPlan, limits: Limits
) -> Result:
    """The result of a stop or a reached gap before any search: the first plan, if there is one."""
    if first.proposal is None or first.certified is None:
        nothing = NoPlan(f"{limits.end} came before any plan was found", proved=False)
        return _refused(problem, planner.name, nothing, limits, monotonic() - first.began)
    plan = first.certified(first.proposal)
    return _answered(planner, first.proposal, plan, limits, first.began)


def _answered(
    planner: Planner,
    answer: Proposal | PeriodicProposal,
    certified: PipelinePlan,
    limits: Limits,
    began: float,
) -> Result:
    """The result with the certified plan of ``answer``."""
    attempts, proof = getattr(answer, "attempts", ()), certified.certificate
    assert proof is not None
    orders = planner.options.order or planner.options.out_of_order  # of stages that are given
    bound = proof.schedule_bound_seconds if orders else proof.bound_seconds
    status = settled(limits.status(found=True), proof.cost_seconds, bound, OPTIMAL_GAP)
    ended = ""
    if status is Status.FEASIBLE and proof.gap <= limits.gap:
        ended = f"a gap of {proof.gap:.2%} is reached, at most {limits.gap:.2%} was asked for"
    return Result(
        status, planner.name, certified, proof.cost_seconds, proof.bound_seconds, proof.gap,
        proof.proved_by, monotonic() - began, "; ".join(filter(None, (ended, *answer.notes))),
        attempts, proof.plans, ended,
    )  # fmt: skip


def _with_shards(
    problem: PipelineProblem, limits: Limits, asked: Choices, result: Result
) -> Result:
    """The result with shards in its plan, or in one that fits only so: no bound is about it."""
    began = monotonic()
    if result.plan is not None:
        found = sharded(problem, result.plan, asked.shards, limits.stopped, _is_ordered(asked))
    else:
        found = _fitting_with_shards(problem, limits, asked, result.planner)
    if found is None and result.plan is None:
        return replace(result, reason=f"{result.reason}; nor was a plan with shards found")
    note = note_on_shards(found, result.plan, asked.shards)
    reason = "; ".join(filter(None, (note, result.reason)))
    if found is None or found is result.plan:
        return replace(result, reason=reason)
    return Result(
        Status.FEASIBLE, result.planner, found, _seconds(found), None, None, None,
        result.seconds + monotonic() - began, reason,
    )  # fmt: skip


def _is_ordered(asked: Choices) -> bool:
    """Whether plans are for a framework that has orders of its own."""
    return asked.runtime is not None and not asked.runtime.any_order


def _fitting_with_shards(
    problem: PipelineProblem, limits: Limits, asked: Choices, planner: str
) -> PipelinePlan | None:
    """The fastest plan with shards, from plans found for a problem with smaller states."""
    every = list(smaller_states(problem, asked.shards))
    plain, each = replace(asked, shards="none"), limits.seconds / max(1, len(every))
    best: PipelinePlan | None = None
    for smaller in every:
        given = plan(smaller, planner, replace(limits, seconds=each), choices=plain).plan
        found = given and sharded(problem, given, asked.shards, limits.stopped, _is_ordered(asked))
        if found is None or found is given:  # without shards it is a plan of the smaller states
            continue
        if best is None or _seconds(found) < _seconds(best):
            best = found
    return best


def _seconds(one: PipelinePlan) -> float:
    assert one.predicted is not None
    return one.predicted.iteration_seconds


def _search_limits(
    problem: PipelineProblem, limits: Limits, target: GapStop, began: float
) -> Limits:
    """The limits of the search, with the time to check and certify its answer left out."""
    left = limits.seconds - (monotonic() - began)
    last = _CERTIFYING * limits.seconds if limits.seconds < math.inf else 0.0
    seconds = max(left - checking_seconds(problem) - last, left / 2, 0.0)
    return replace(limits, seconds=seconds, stop=target if limits.gap > 0 else limits.stop)


def _refused(
    problem: PipelineProblem, planner: str, answer: NoPlan, limits: Limits, seconds: float
) -> Result:
    """The result without a plan: the infeasible class, or the best bound."""
    if answer.proved:
        reason = f"{planner} has no plan: {answer.reason}"
        if answer.plans is not None:
            reason = f"{answer.plans.phrase('no')} fits: {answer.reason}"
        return Result(
            Status.INFEASIBLE, planner, None, None, None, None, None, seconds, reason,
            answer.attempts, answer.plans,
        )  # fmt: skip
    known = (*every_plan_bounds(problem), *answer.bounds)
    best = best_of([bound for bound in known if bound.seconds < math.inf])
    return Result(
        limits.status(found=False), planner, None, None, best.seconds, None, best.proved_by,
        seconds, answer.reason, answer.attempts, best.plans,
    )  # fmt: skip
