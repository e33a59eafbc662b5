"""Plans of pipelines: from a model and a cluster to a certified plan."""

from dataclasses import replace
from functools import partial

from stagewright.formulations.forms.answers import (
    Limits,
    OnProgress,
    Status,
    StopToken,
    settled,
    silent,
)
from stagewright.formulations.plans.assembly import certify
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.schedules.groups import plan_of_devices, problem_of_groups
from stagewright.service.engines import HERE, Engine
from stagewright.service.pipelines.answers import (
    OtherAnswer,
    PlanAnswer,
    RestrictionAnswer,
    SizeAnswer,
)
from stagewright.service.pipelines.batches import plan_every_size, problems_of
from stagewright.service.pipelines.launching import plan_for, required_runtime, restricted
from stagewright.service.pipelines.plans import class_object, summary_fields
from stagewright.service.pipelines.requests import PlanRequest
from stagewright.solvers.pipelines.every_plan import every_plan_bounds
from stagewright.solvers.planners import auto, spp
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planners.steps.reporting import with_certificate
from stagewright.solvers.planners.steps.warm_start import in_its_order
from stagewright.solvers.planning import (
    OPTIMAL_GAP,
    PLANNERS,
    Restriction,
    Result,
    able_planner,
    require_planner,
)
from stagewright.solvers.planning import plan as solve


def plan(
    request: PlanRequest,
    on_progress: OnProgress = silent,
    stop: StopToken | None = None,
    engine: Engine = HERE,
) -> PlanAnswer:
    """Plan; infeasible, out of time and interrupted are answers.

    ``on_progress`` is told of every better plan and can ask for it (``Progress.best``); ``stop``
    ends the search within about a second and keeps the best plan so far. The sizes of a batch's
    microbatches are planned by ``engine``, which may plan several at a time.

    Raises
    ------
    InputError
        If the request has options that no plan, or not this planner, supports.
    """
    require_supported(request)
    if request.tensor is not None:
        return answer_of(request.problem, _of_groups(request, request.tensor, stop))
    limits = request.limits(stop)
    if request.batch is None or _chooses_itself(request):
        found = _solve(request, request.problem, limits, on_progress, alone=True)
        return answer_of(request.problem, found)
    problems = problems_of(request.problem, request.batch, request.microbatch_size)
    if len(problems) == 1:
        found = _solve(request, problems[0], limits, on_progress, alone=True)
        return answer_of(problems[0], found)
    solve_one = partial(_solve, request)
    return answer_of(*plan_every_size(problems, solve_one, limits, on_progress, engine))


def require_supported(request: PlanRequest) -> None:
    """Refuse at once what :func:`plan` refuses before it searches.

    Raises
    ------
    InputError
        If there is no such planner, or it does not support what the request asks for; or there
        are no such microbatches of a batch, or no groups of devices of a tensor degree.
    """
    require_planner(request.planner)
    choices, planner = _choices(request), request.planner
    problems: tuple[PipelineProblem, ...] = (request.problem,)
    if not _chooses_itself(request):
        choices = replace(choices, batch=None)
        if request.batch is not None:
            problems = problems_of(request.problem, request.batch, request.microbatch_size)
    if request.tensor is not None:
        planner = _planner_of_groups(request)
        problems = (problem_of_groups(request.problem, request.tensor),)
    elif request.runtime is not None:
        runtime = required_runtime(request.runtime, request.chain, choices)
        choices = replace(choices, runtime=runtime)
    for problem in problems:
        able_planner(problem, planner, choices)


def _chooses_itself(request: PlanRequest) -> bool:
    """Whether the planner chooses the microbatches of a batch, by a model of its own."""
    known = PLANNERS.get(request.planner)
    return request.microbatch_size is None and known is not None and known.options.batch


def _solve(
    request: PlanRequest,
    problem: PipelineProblem,
    limits: Limits,
    on_progress: OnProgress,
    earlier: Result | None = None,
    alone: bool = False,
) -> Result:
    """Plan one problem, for a framework if the request names one; ``alone``: the only one."""
    choices = _choices(request)
    if not _chooses_itself(request):
        choices = replace(choices, batch=None)
    if request.runtime is not None:
        compares = alone or earlier is not None  # of a batch only the best sizes
        asked = (request.runtime, problem, request.planner, limits, on_progress, choices)
        return plan_for(*asked, compares)
    known = PLANNERS.get(request.planner)
    if earlier is not None and known is not None and known.options.start and request.order is None:
        choices = replace(choices, start=earlier.plan)
    return solve(problem, request.planner, limits, on_progress, choices)


def _choices(request: PlanRequest) -> Choices:
    return Choices(
        request.recompute,
        request.offload,
        request.group_size,
        request.period_seconds,
        request.start,
        request.backend,
        request.order,
        request.out_of_order,
        request.batch,
        request.vertical_sync,
        request.shards,
    )


def _planner_of_groups(request: PlanRequest) -> str:
    """By default SPP's, or that of the order.

    Some planners of the portfolio make plans that are not run with divided stages.
    """
    is_default = request.planner == auto.PLANNER.name and request.order is None
    return spp.PLANNER.name if is_default else request.planner


def _of_groups(request: PlanRequest, degree: int, stop: StopToken | None) -> Result:
    """The plan whose stages all have a tensor degree, with the bounds on such plans."""
    problem = problem_of_groups(request.problem, degree)
    limits = request.limits(stop)
    found = solve(problem, _planner_of_groups(request), limits, choices=_choices(request))
    how = f"every {degree} devices are planned as one"
    if found.plan is None:
        how = f"{how}, which alone are spoken of here"
    result = replace(
        found,
        reason="; ".join(filter(None, (how, found.reason))),
        bound=None,
        gap=None,
        proved_by=None,
        plans=None,
        attempts=(),
        other=None,
    )
    if found.plan is None:
        return result
    plan = plan_of_devices(request.problem, found.plan, degree)
    plan = with_certificate(request.problem, plan, limits.seconds)
    if plan.certificate is None:
        assert plan.predicted is not None
        cost = plan.predicted.iteration_seconds
        return replace(result, status=Status.FEASIBLE, plan=plan, cost=cost)
    return _proved(result, plan)


def _proved(result: Result, plan: PipelinePlan) -> Result:
    """The result with this certified plan, of which no search says that it is optimal."""
    proof = plan.certificate
    assert proof is not None
    is_stopped = result.status is Status.INTERRUPTED
    status = settled(
        Status.INTERRUPTED if is_stopped else Status.FEASIBLE,
        proof.cost_seconds,
        proof.bound_seconds,
        OPTIMAL_GAP,
    )
    return replace(
        result,
        status=status,
        plan=plan,
        cost=proof.cost_seconds,
        bound=proof.bound_seconds,
        gap=proof.gap,
        proved_by=proof.proved_by,
        plans=proof.plans,
        other=None,
    )


def repriced(request: PlanRequest, known: PlanAnswer, given: PipelinePlan | None) -> PlanAnswer:
    """The known answer, or that of the given plan in its order where it is shorter.

    Nothing is searched for. Where plans have a tensor degree, shards or one of several sizes of
    microbatches, the known answer is kept.
    """
    is_plain = request.tensor is None and request.batch is None and request.shards == "none"
    problem, result = request.problem, known.result
    plan = in_its_order(problem, given) if is_plain and given is not None else None
    if plan is None or plan.predicted is None:
        return known
    if result.cost is not None and plan.predicted.iteration_seconds >= result.cost:
        return known
    stated = None if result.plan is None else result.plan.certificate
    bounds = () if stated is None else (one for one in stated.bounds if one.scope == "problem")
    result = _proved(result, certify(problem, plan, (*every_plan_bounds(problem), *bounds), ()))
    if request.runtime is not None:
        runtime = required_runtime(request.runtime, request.chain, _choices(request))
        result = restricted(problem, runtime, result, _free_cost(known))
    return answer_of(problem, result)


def _free_cost(known: PlanAnswer) -> float | None:
    return None if known.restriction is None else known.restriction.free_cost_seconds


def answer_of(problem: PipelineProblem, result: Result) -> PlanAnswer:
    """The answer: the same fields whatever it is; without a plan many are None."""
    fields = summary_fields(result.plan) | {
        "planner": result.planner,
        "cost_seconds": result.cost,
        "bound_seconds": result.bound,
        "gap": result.gap,
        "proved_by": result.proved_by,
        "plans": class_object(result.plans),
    }
    return PlanAnswer.of(
        result,
        **fields,
        wall_seconds=result.seconds,
        microbatches=problem.microbatches if result.plan is None else result.plan.microbatches,
        memory_limit_bytes=problem.memory_limit_bytes,
        model=problem.chain.name,
        cluster=problem.cluster.name,
        restriction=_restriction(result.restriction),
        sizes=tuple(
            SizeAnswer.of(one, cost_seconds=one.cost, bound_seconds=one.bound)
            for one in result.sizes
        ),
        other=_other(result.other),
        result=result,
        chain=problem.chain,
    )


def _other(plan: PipelinePlan | None) -> OtherAnswer | None:
    if plan is None or plan.certificate is None:
        return None
    return OtherAnswer.of(plan.certificate, plans=class_object(plan.certificate.plans))


def _restriction(found: Restriction | None) -> RestrictionAnswer | None:
    if found is None:
        return None
    return RestrictionAnswer.of(
        found,
        plans=class_object(found.plans),
        bound_seconds=found.bound,
        free_cost_seconds=found.free_cost,
    )
