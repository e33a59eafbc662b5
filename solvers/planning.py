"""The front of all planners: run one or the portfolio, then assemble, check and certify."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import cast, get_args

from stagewright.formulations.checking.certificates import best_of
from stagewright.formulations.forms.answers import Limits, OnProgress, Status, silent
from stagewright.formulations.patterns.one_f_one_b import (
    PATTERN_LOAD,
    PATTERN_MEMORY,
    iteration_bound,
)
from stagewright.formulations.patterns.one_f_one_b import load_bound as load_of
from stagewright.formulations.patterns.pattern import pattern_problem
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
from stagewright.solvers.planners.auto import plan_auto
from stagewright.solvers.planners.dp import plan_dp
from stagewright.solvers.planners.exact import plan_exact
from stagewright.solvers.planners.general import plan_general
from stagewright.solvers.planners.gpipe import plan_gpipe
from stagewright.solvers.planners.hetpipe import plan_hetpipe
from stagewright.solvers.planners.madpipe import plan_madpipe, plan_one_f_one_b_star
from stagewright.solvers.planners.pipedream import plan_pipedream
from stagewright.solvers.planners.proposal import (
    Attempt,
    Choices,
    NoPlan,
    PeriodicProposal,
    Proposal,
    Recomputation,
    scheduling_of,
)
from stagewright.solvers.planners.recomputing import Planner, plan_recomputing
from stagewright.solvers.planners.reporting import reporting
from stagewright.solvers.planners.spp import plan_spp
from stagewright.solvers.planners.warm_up import compile_kernels

OPTIMAL_GAP = 1e-6  # relative; integer ticks and sums of floats round below it


@dataclass(frozen=True, slots=True)
class PlannerInfo:
    """A planner: its name, what it does, where it comes from, and the function."""

    name: str
    summary: str
    source: str
    run: Callable[..., Proposal | PeriodicProposal | NoPlan]
    periodic: bool = False
    recompute: tuple[Recomputation, ...] = get_args(Recomputation)
    offload: bool = False


PLANNERS = {
    info.name: info
    for info in (
        PlannerInfo("spp", "device order by min-cuts, balanced partition, list schedule, "
                    "best number of stages", "Luo et al., INFOCOM 2022", plan_spp),
        PlannerInfo("exact", "partition, mapping and order at once, for small cases",
                    "joint branch and bound over CP-SAT schedules", plan_exact),
        PlannerInfo("dp", "data parallelism: the whole model on every device",
                    "SPP section V-A, baseline", plan_dp),
        PlannerInfo("gpipe", "equal numbers of layers, all forwards first",
                    "Huang et al., NeurIPS 2019", plan_gpipe),
        PlannerInfo("pipedream", "hierarchical partition and replication, 1F1B with a flush",
                    "Narayanan's thesis 2.4.1", plan_pipedream),
        PlannerInfo("hetpipe", "a pipeline in every server, data parallelism among servers",
                    "Park et al., ATC 2020, with a synchronous barrier", plan_hetpipe),
        PlannerInfo("1f1b-star", "the best periodic plan with a stage on every device; "
                    "asynchronous, two versions of the weights", "MadPipe 4.1",
                    plan_one_f_one_b_star, periodic=True, recompute=("none", "full", "auto"),
                    offload=True),
        PlannerInfo("madpipe", "periodic plans for little memory: some devices have several "
                    "stages; asynchronous, two versions of the weights",
                    "Beaumont et al., ScaDL 2022", plan_madpipe, periodic=True,
                    recompute=("none", "full", "auto"), offload=True),
        PlannerInfo("general", "local search over all finite plans: several stages on a device, "
                    "any replication, I and W, recomputation, offloading",
                    "list schedules within memory", plan_general, offload=True),
        PlannerInfo("auto", "all but the asynchronous ones within the time limit, then the "
                    "best plan's schedule improved by CP-SAT", "portfolio", plan_auto,
                    offload=True),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a planning problem.

    ``cost`` is the iteration in seconds, ``bound`` bounds every plan of the class ``plans`` from
    below, ``gap`` is (cost - bound) / cost; ``seconds`` is the wall time. Of an infeasible problem
    ``plans`` is the class that has no plan, None if that is only what the planner makes. ``reason``
    says why there is no plan, or how the planner went; ``attempts`` what the planners of a
    portfolio gave.
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
    """Plan ``problem``; infeasible, out of time and interrupted are answers, not errors.

    ``on_progress`` is told the best plan's iteration and the best bound on every plan so far.

    The first use on a machine compiles the kernels; that does not count towards the limit.

    Raises
    ------
    InputError
        If ``planner`` is not one of PLANNERS, or cannot honour ``choices``, or these ask for a
        period that no plan has.
    """
    if planner not in PLANNERS:
        raise InputError(f"unknown planner {planner!r}; there are {', '.join(PLANNERS)}")
    info = PLANNERS[planner]
    asked = choices or Choices()
    _require_honoured(info, asked)
    compile_kernels()
    began = monotonic()
    limits = limits or Limits()
    nowhere = why_nothing_fits(problem)
    if nowhere is not None:
        nothing = NoPlan(nowhere, plans=EVERY_PLAN)
        return _refused(problem, planner, nothing, limits, monotonic() - began)
    report = reporting(problem, on_progress, info.periodic)
    answer = _run(info, problem, limits, report, asked)
    if isinstance(answer, NoPlan):
        return _refused(problem, planner, answer, limits, monotonic() - began)
    if isinstance(answer, PeriodicProposal):
        certified = _certified_pattern(problem, planner, answer)
        attempts: tuple[Attempt, ...] = ()
    else:
        certified, attempts = _certified(problem, planner, answer), answer.attempts
    proof = certified.certificate
    assert proof is not None
    status = Status.OPTIMAL if proof.gap <= OPTIMAL_GAP else limits.status(found=True)
    return Result(
        status, planner, certified, proof.cost_seconds, proof.bound_seconds, proof.gap,
        proof.proved_by, monotonic() - began, "; ".join(answer.notes), attempts, proof.plans,
    )  # fmt: skip


def _require_honoured(info: PlannerInfo, choices: Choices) -> None:
    """Refuse what the planner cannot honour, and name those that can."""
    every = PLANNERS.values()
    wrong = []
    if choices.recompute is not None and choices.recompute not in info.recompute:
        able = [one.name for one in every if choices.recompute in one.recompute]
        wrong.append((f"recompute {choices.recompute!r}", able))
    if choices.offload and not info.offload:
        wrong.append(("offloading", [one.name for one in every if one.offload]))
    if (choices.group_size, choices.period_seconds) != (None, None) and not info.periodic:
        asked = "a period" if choices.group_size is None else "a group size"
        wrong.append((asked, [one.name for one in every if one.periodic]))
    for what, able in wrong:
        raise InputError(f"planner {info.name!r} does not know {what}: use {' or '.join(able)}")


def _run(
    info: PlannerInfo,
    problem: PipelineProblem,
    limits: Limits,
    on_progress: OnProgress,
    choices: Choices,
) -> Proposal | PeriodicProposal | NoPlan:
    if info.periodic:
        return info.run(problem, limits, on_progress, choices)
    if info.name in ("auto", "general"):
        return info.run(problem, limits, on_progress, choices)
    run = cast(Planner, info.run)
    return plan_recomputing(run, problem, limits, on_progress, choices.recompute or "none")


def _refused(
    problem: PipelineProblem, planner: str, answer: NoPlan, limits: Limits, seconds: float
) -> Result:
    """No plan: the class that has none, or the best bound on those that it may have."""
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


def _certified_pattern(
    problem: PipelineProblem, planner: str, proposal: PeriodicProposal
) -> PipelinePlan:
    drawn = assemble_pattern(problem, planner, proposal.stages, proposal.pattern)
    asked = pattern_problem(problem, proposal.stages)
    load = asked.iteration_seconds(load_of(asked))
    bounds = [
        *every_plan_bounds(problem),
        *proposal.bounds,
        Bound(load, PATTERN_LOAD, "schedule", PATTERNS),
        Bound(iteration_bound(asked), PATTERN_MEMORY, "schedule", PATTERNS),
    ]
    return certify(problem, drawn, bounds, ())


def _fill_and_drain(problem: PipelineProblem, plans: PlanClass, cost: float) -> tuple[Bound, ...]:
    """The relaxation's bound on the smaller of its classes that contains ``plans``."""
    for wider, name, known in (
        (False, FILL_AND_DRAIN, DISJOINT_SPLIT),
        (True, WIDE_FILL_AND_DRAIN, DISJOINT_WHOLE),
    ):
        if known.contains(plans):
            return (Bound(fill_and_drain_bound(problem, cost, wider), name, "problem", known),)
    return ()


def _certified(problem: PipelineProblem, planner: str, proposal: Proposal) -> PipelinePlan:
    drawn = assemble(problem, planner, proposal.stages, proposal.starts)
    assert drawn.predicted is not None
    cost = drawn.predicted.iteration_seconds
    bounds = [
        *every_plan_bounds(problem),
        *_fill_and_drain(problem, class_of(drawn), cost),
        *proposal.bounds,
    ]
    scheduling = scheduling_of(problem, proposal.stages)
    if scheduling is not None:
        bounds += schedule_bounds(scheduling)
    return certify(problem, drawn, bounds, proposal.guarantees)
