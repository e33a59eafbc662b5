"""Plans of pipelines: from a model and a cluster to a certified plan."""

from dataclasses import asdict

from stagewright.formulations.forms.answers import OnProgress, StopToken, silent
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.service.pipeline_answers import AttemptAnswer, PlanAnswer
from stagewright.service.pipeline_requests import PlanRequest
from stagewright.service.plans import class_object, summary_fields
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
    choices = Choices(
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
    return answer_of(
        request.problem,
        solve(request.problem, request.planner, request.limits(stop), on_progress, choices),
    )


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
