"""Entry point of all planners: run one or the portfolio, then assemble, check and certify."""

import math
from dataclasses import dataclass
from functools import partial
from time import monotonic

from stagewright.formulations.checking.certificates import best_of
from stagewright.formulations.forms.answers import Limits, OnProgress, Status, silent
from stagewright.formulations.patterns.one_f_one_b import (
    PATTERN_LOAD,
    PATTERN_MEMORY,
    iteration_bound,
    pattern_load_bound,
)
from stagewright.formulations.patterns.pattern_problems import pattern_problem
from stagewright.formulations.pipelines.bounds import schedule_bounds
from stagewright.formulations.pipelines.every_plan import why_nothing_fits
from stagewright.formulations.pipelines.relaxation import FILL_AND_DRAIN, WIDE_FILL_AND_DRAIN
from stagewright.formulations.plans.assembly import assemble, assemble_pattern, certify
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, PipelinePlan
from stagewright.formulations.plans.plan_class import (
    DISJOINT_SPLIT,
    DISJOINT_WHOLE,
    EVERY_PLAN,
    PATTERNS,
    PlanClass,
    class_of,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.pipelines.every_plan import every_plan_bounds
from stagewright.solvers.pipelines.relaxation import fill_and_drain_bound
from stagewright.solvers.planners import auto, exact, general, servers, spp
from stagewright.solvers.planners.baselines import dp, gpipe, hetpipe, pipedream
from stagewright.solvers.planners.periodic import madpipe, one_f_one_b_star
from stagewright.solvers.planners.planner import Planner, require_honoured, require_host_links
from stagewright.solvers.planners.proposal import (
    Attempt,
    Choices,
    NoPlan,
    PeriodicProposal,
    Proposal,
    scheduling_of,
)
from stagewright.solvers.planners.reporting import reporting
from stagewright.solvers.planners.warm_up import compile_kernels

OPTIMAL_GAP = 1e-6  # relative gap of an optimal plan; rounding of ticks and sums is below it


PLANNERS: dict[str, Planner] = {
    one.name: one
    for one in (
        spp.PLANNER,
        exact.PLANNER,
        dp.PLANNER,
        gpipe.PLANNER,
        pipedream.PLANNER,
        hetpipe.PLANNER,
        one_f_one_b_star.PLANNER,
        madpipe.PLANNER,
        servers.PLANNER,
        general.PLANNER,
        auto.PLANNER,
    )
}


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a planning problem.

    ``cost`` is the iteration in seconds, ``bound`` a lower bound on every plan of the class
    ``plans``, and ``gap`` is (cost - bound) / cost; ``seconds`` is the wall time. If infeasible,
    ``plans`` is the class that has no plan, None if only the planner's own kind of plan was
    searched. ``reason`` says why there is no plan, or has notes of the planner; ``attempts`` are
    the results of the planners of a portfolio.
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


def plan(
    problem: PipelineProblem,
    planner: str = "auto",
    limits: Limits | None = None,
    on_progress: OnProgress = silent,
    choices: Choices | None = None,
) -> Result:
    """Plan ``problem``; infeasible, out of time and interrupted are statuses, not errors.

    ``on_progress`` receives the iteration of the best plan, the best bound on every plan so far,
    and a function that returns the plan.

    The first use on a machine compiles the kernels, which does not count towards the limit.

    Raises
    ------
    InputError
        If ``planner`` is not one of PLANNERS, or does not support ``choices``, or the requested
        period is below the load bound.
    """
    if planner not in PLANNERS:
        raise InputError(f"unknown planner {planner!r}; there are {', '.join(PLANNERS)}")
    proposer = PLANNERS[planner]
    asked = choices or Choices()
    require_honoured(proposer, asked, PLANNERS.values())
    if asked.offload:
        require_host_links(problem)
    compile_kernels()
    began = monotonic()
    limits = limits or Limits()
    reason = why_nothing_fits(problem)
    if reason is not None:
        nothing = NoPlan(reason, plans=EVERY_PLAN)
        return _refused(problem, planner, nothing, limits, monotonic() - began)
    make_plan = partial(_certified_plan, problem, planner)
    report = reporting(problem, on_progress, proposer.options.period_seconds, make_plan)
    answer = proposer.propose(problem, asked, limits, report)
    if isinstance(answer, NoPlan):
        return _refused(problem, planner, answer, limits, monotonic() - began)
    certified = make_plan(answer)
    attempts = () if isinstance(answer, PeriodicProposal) else answer.attempts
    proof = certified.certificate
    assert proof is not None
    status = Status.OPTIMAL if proof.gap <= OPTIMAL_GAP else limits.status(found=True)
    return Result(
        status, planner, certified, proof.cost_seconds, proof.bound_seconds, proof.gap,
        proof.proved_by, monotonic() - began, "; ".join(answer.notes), attempts, proof.plans,
    )  # fmt: skip


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


def _certified_plan(
    problem: PipelineProblem, planner: str, answer: Proposal | PeriodicProposal
) -> PipelinePlan:
    """The certified plan of a proposal."""
    if isinstance(answer, PeriodicProposal):
        return _certified_pattern(problem, planner, answer)
    return _certified(problem, planner, answer)


def _certified_pattern(
    problem: PipelineProblem, planner: str, proposal: PeriodicProposal
) -> PipelinePlan:
    assembled = assemble_pattern(problem, planner, proposal.stages, proposal.pattern)
    asked = pattern_problem(problem, proposal.stages)
    load = asked.iteration_seconds(pattern_load_bound(asked))
    bounds = [
        *every_plan_bounds(problem),
        *proposal.bounds,
        Bound(load, PATTERN_LOAD, "schedule", PATTERNS),
        Bound(iteration_bound(asked), PATTERN_MEMORY, "schedule", PATTERNS),
    ]
    return certify(problem, assembled, bounds, ())


def _fill_and_drain(problem: PipelineProblem, plans: PlanClass, cost: float) -> tuple[Bound, ...]:
    """The relaxation's bound for the smaller of its classes that contains ``plans``."""
    for wider, name, known in (
        (False, FILL_AND_DRAIN, DISJOINT_SPLIT),
        (True, WIDE_FILL_AND_DRAIN, DISJOINT_WHOLE),
    ):
        if known.contains(plans):
            return (Bound(fill_and_drain_bound(problem, cost, wider), name, "problem", known),)
    return ()


def _certified(problem: PipelineProblem, planner: str, proposal: Proposal) -> PipelinePlan:
    assembled = assemble(problem, planner, proposal.stages, proposal.starts)
    assert assembled.predicted is not None
    cost = assembled.predicted.iteration_seconds
    bounds = [
        *every_plan_bounds(problem),
        *_fill_and_drain(problem, class_of(assembled), cost),
        *proposal.bounds,
    ]
    scheduling = scheduling_of(problem, proposal.stages)
    if scheduling is not None:
        bounds += schedule_bounds(scheduling)
    return certify(problem, assembled, bounds, proposal.guarantees)
