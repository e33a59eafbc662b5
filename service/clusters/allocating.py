"""Allocations of a cluster's accelerators."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from stagewright.executor.clusters.ray_ranks import connected
from stagewright.formulations.clusters.allocation import (
    Allocation,
    AllocationProblem,
    accelerators_in_use,
    problem_of,
)
from stagewright.formulations.clusters.allocation_plan import (
    AllocationPlan,
    digest_of,
    shares_of,
)
from stagewright.formulations.forms.answers import Limits, OnProgress, StopToken, silent
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import PairRate
from stagewright.service.clusters.answers import (
    AllocateAnswer,
    EstimateAnswer,
    MeasureAnswer,
    NewJobAnswer,
    PriceJobsAnswer,
)
from stagewright.service.clusters.rates import computed_rates
from stagewright.service.clusters.requests import (
    AllocateRequest,
    EstimateRequest,
    MeasureRequest,
    PriceJobsRequest,
    RoundsRequest,
    RunClusterRequest,
    SimulateClusterRequest,
)
from stagewright.solvers.clusters.estimation import Estimator, pairs_to_profile
from stagewright.solvers.clusters.policies import AllocationResult, policy_named, require_policy
from stagewright.solvers.clusters.policies import allocate as solve

if TYPE_CHECKING:
    from stagewright.solvers.clusters.partitioned import JobPart, Solved

JobsRequest = AllocateRequest | RoundsRequest | SimulateClusterRequest | RunClusterRequest
J = TypeVar("J", AllocateRequest, RoundsRequest, SimulateClusterRequest, RunClusterRequest)


def estimate(request: EstimateRequest) -> EstimateAnswer:
    """The workload with the rates of all pairs: measured ones as they are, the others estimated.

    Raises
    ------
    InputError
        If a job was measured in a pair but not alone, or no reference job has a new job's scale.
    """
    measured, estimator = request.workload.throughputs, Estimator(request.reference)
    nearest = estimator.nearest(measured)
    whole = estimator.estimate(measured)
    known = {_place(pair) for pair in (*request.reference.pairs, *measured.pairs)}
    found = [pair for pair in whole.pairs if _place(pair) not in known]
    return EstimateAnswer(
        new=tuple(
            NewJobAnswer(model=model, scale=scale, nearest=reference)
            for (model, scale), reference in nearest.items()
        ),
        measured=len(known),
        estimated=found,
        workload=replace(request.workload, throughputs=whole),
    )


def _place(pair: PairRate) -> tuple[object, ...]:
    return (pair.scale, pair.accelerator, *sorted(pair.models))


def measure(request: MeasureRequest) -> MeasureAnswer:
    """A random part of all pairs of a new job with reference jobs, at least one."""
    kind = (request.model, request.scale)
    pairs = pairs_to_profile(request.reference, kind, request.fraction, request.seed)
    return MeasureAnswer(model=request.model, scale=request.scale, pairs=pairs)


def allocate(
    request: AllocateRequest, on_progress: OnProgress = silent, stop: StopToken | None = None
) -> AllocateAnswer:
    """Divide the accelerators; infeasible is an answer.

    Raises
    ------
    InputError
        If a throughput is missing, a job fits nowhere, or the policy lacks what it needs.
    """
    whole, priced = with_throughputs(request, on_progress, stop)
    problem = _allocatable(whole)
    answer = answer_of(request, problem, solved(request, problem, stop), priced)
    if answer.plan is None or not (request.forecast or request.explain):
        return answer
    from stagewright.service.clusters.explaining import with_explanation  # with the simulation

    return with_explanation(request, answer, stop)


def with_throughputs(
    request: J, on_progress: OnProgress = silent, stop: StopToken | None = None
) -> tuple[J, PriceJobsAnswer | None]:
    """The request with all throughputs of its workload, and the computed ones; None without any."""
    pricing = _pricing(request)
    if pricing is None:
        return request, None
    from stagewright.service.clusters.pricing import price_jobs  # with the search for layouts

    done = price_jobs(pricing, on_progress, stop)
    return request.model_copy(update={"workload": done.workload}), done


def require_trainings(request: JobsRequest) -> bool:
    """Whether a workload has trainings; refuses unknown ones, and an unknown policy.

    What else the policy lacks is known when their throughputs are.
    """
    pricing = _pricing(request)
    if pricing is None:
        return False
    from stagewright.service.clusters.pricing import require_priceable

    policy_named(request.policy)
    require_priceable(pricing)
    return True


def _pricing(request: JobsRequest) -> PriceJobsRequest | None:
    """The request for the throughputs of a workload's trainings; None without any."""
    workload = request.workload
    if workload is None or not workload.trainings:
        return None
    pool, placement = request.pool, request.placement
    return PriceJobsRequest.of(workload=workload, pool=pool, placement=placement)


def require_allocatable(request: AllocateRequest) -> None:
    """Refuse what can be refused before a search. Raises InputError as `allocate`."""
    if not require_trainings(request):
        _allocatable(request)


def _allocatable(request: AllocateRequest) -> AllocationProblem:
    """The problem; refuses what the policy lacks for it."""
    problem = problem_for(request)
    if request.parts is None:
        require_policy(problem, request.policy, request.budget_dollars, request.backend)
    else:
        from stagewright.solvers.clusters.partitioned import require_parts

        require_parts(problem, request.policy, request.parts)
    return problem


def problem_for(request: AllocateRequest | RoundsRequest) -> AllocationProblem:
    """The problem of the request's jobs, whose throughputs are all known."""
    return problem_of(
        request.workload,
        request.pool,
        space_sharing=request.space_sharing,
        placement=request.placement,
    )


def solved(
    request: AllocateRequest, problem: AllocationProblem, stop: StopToken | None
) -> AllocationResult:
    """What the policy of the request allocates."""
    limits = request.limits(stop)
    if request.parts is None:
        budget = request.budget_dollars
        return solve(
            problem, request.policy, limits, budget_dollars=budget, backend=request.backend
        )
    from stagewright.solvers.clusters.partitioned import allocate_partitioned, in_process

    spread = on_ray if request.at_once else in_process
    return allocate_partitioned(problem, request.policy, request.parts, limits, spread)


def on_ray(
    run: "Callable[[JobPart, Limits], Solved]", parts: "Sequence[JobPart]", limits: Limits
) -> "list[Solved]":
    """Solve all parts at once, on the Ray cluster of this process or one that is started here.

    Raises InputError if Ray is not installed.
    """
    with connected({}, None) as ray:
        task = ray.remote(run)
        found: list[Solved] = ray.get([task.remote(part, limits) for part in parts])
        return found


def answer_of(
    request: AllocateRequest | RoundsRequest,
    problem: AllocationProblem,
    result: AllocationResult,
    priced: PriceJobsAnswer | None,
) -> AllocateAnswer:
    """The policy's result as an answer."""
    plan = _plan(request, problem, result)
    return AllocateAnswer.of(
        result,
        wall_seconds=result.seconds,
        utilisation=_utilisation(problem, result),
        duals=None if result.duals is None else result.duals.named(problem),
        one_more=_by_type(problem, result.one_more),
        allocation=None if plan is None else plan.shares,
        first=None if result.first is None else shares_of(problem, result.first),
        prices=tuple(computed_rates((priced or request).workload.throughputs)),
        assumed=() if priced is None else priced.assumed,
        problem=problem,
        result=result,
        plan=plan,
    )


def _plan(
    request: AllocateRequest | RoundsRequest, problem: AllocationProblem, result: AllocationResult
) -> AllocationPlan | None:
    if result.allocation is None:
        return None
    return AllocationPlan(
        digest=digest_of(request.workload, request.pool),
        policy=result.policy,
        shares=shares_of(problem, result.allocation),
        space_sharing=request.space_sharing,
        placement=request.placement,
        objective=_finite(result.objective),
        bound=_finite(result.bound),
        proved_by=result.proved_by,
        notes=result.notes,
    )


def _finite(value: float | None) -> float | None:
    """The value; None if it is infinite, as the makespan of a job without progress is."""
    return value if value is not None and math.isfinite(value) else None


def _utilisation(problem: AllocationProblem, result: AllocationResult) -> dict[str, float] | None:
    """The fraction of each type's accelerators in use; None without an allocation."""
    if result.allocation is None:
        return None
    used = accelerators_in_use(problem, result.allocation)
    return _by_type(problem, used / problem.table.counts)


def _by_type(problem: AllocationProblem, values: Floats | None) -> dict[str, float] | None:
    """The values of the pool's types, by their names."""
    if values is None:
        return None
    return dict(zip(problem.table.pool.names, values.tolist(), strict=True))


def policy_allocator(
    policy: str, budget_dollars: float | None = None
) -> Callable[[AllocationProblem], Allocation]:
    """The policy as a function for simulated and real clusters: what runs until all is asked again.

    Raises InputError where there is no allocation.
    """

    def run(problem: AllocationProblem) -> Allocation:
        result = solve(problem, policy, budget_dollars=budget_dollars)
        if result.allocation is None:
            why = "; ".join(result.notes) or result.status.value
            raise InputError(f"policy {policy!r} has no allocation for {len(problem)} jobs: {why}")
        return result.first or result.allocation

    return run
