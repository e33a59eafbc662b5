"""Plans of pipelines: from a model and a cluster to a certified plan."""

from dataclasses import asdict, replace

from stagewright.formulations.forms.answers import OnProgress, Status, StopToken, silent
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.schedules.groups import plan_of_devices, problem_of_groups
from stagewright.service.pipeline_answers import AttemptAnswer, PlanAnswer
from stagewright.service.pipeline_requests import PlanRequest
from stagewright.service.plans import class_object, summary_fields
from stagewright.solvers.planners import auto, spp
from stagewright.solvers.planners.proposal import Choices
from stagewright.solvers.planning import Result
from stagewright.solvers.planning import plan as solve


def plan(
    request: PlanRequest, on_progress: OnProgress = silent, stop: StopToken | None = None
) -> PlanAnswer:
    """Plan; infeasible, out of time and interrupted are answers.

    ``on_progress`` is told of every better plan and can ask for it (``Progress.best``); ``stop``
    ends the search within about a second and keeps the best plan so far.

    Raises
    ------
    InputError
        If the request has options that no plan, or not this planner, supports.
    """
    if request.tensor is not None:
        return answer_of(request.problem, _of_groups(request, request.tensor, stop))
    return answer_of(
        request.problem,
        solve(
            request.problem, request.planner, request.limits(stop), on_progress, _choices(request)
        ),
    )


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


def _of_groups(request: PlanRequest, degree: int, stop: StopToken | None) -> Result:
    """The plan whose stages all have a tensor degree; its bounds are of groups, and not kept.

    By default it is SPP's, or that of the order, as some planners of the portfolio make plans that
    are not run with divided stages.
    """
    planner = request.planner
    if planner == auto.PLANNER.name and request.order is None:
        planner = spp.PLANNER.name
    problem = problem_of_groups(request.problem, degree)
    found = solve(problem, planner, request.limits(stop), choices=_choices(request))
    how = f"every {degree} devices are planned as one, and no bound is proved on such plans"
    if found.plan is None:
        how = f"every {degree} devices are planned as one, which alone are spoken of here"
    result = replace(
        found,
        reason="; ".join(filter(None, (how, found.reason))),
        bound=None,
        gap=None,
        proved_by=None,
        plans=None,
        attempts=(),
    )
    if found.plan is None:
        return result
    plan = plan_of_devices(request.problem, found.plan, degree)
    assert plan.predicted is not None
    cost = plan.predicted.iteration_seconds
    return replace(result, status=Status.FEASIBLE, plan=plan, cost=cost)


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
    return PlanAnswer(
        **fields,
        status=result.status,
        wall_seconds=result.seconds,
        reason=result.reason,
        microbatches=problem.microbatches if result.plan is None else result.plan.microbatches,
        memory_limit_bytes=problem.memory_limit_bytes,
        model=problem.chain.name,
        cluster=problem.cluster.name,
        attempts=tuple(AttemptAnswer(**asdict(attempt)) for attempt in result.attempts),
        result=result,
    )
