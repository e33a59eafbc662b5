"""Plans of training by layer profiles on mixed clusters: the best one, and the check of one."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from stagewright.formulations.forms.answers import Limits, Status, StopToken
from stagewright.formulations.parallelism.document import LayoutBound
from stagewright.formulations.parallelism.profiles.document import (
    ProfiledDocument,
    memory_shortages,
    profiled_document,
    violations,
)
from stagewright.formulations.parallelism.profiles.pipelines import (
    ProfiledEstimate,
    ProfiledPlan,
    ProfiledProblem,
    evaluate,
)
from stagewright.graphs.documents.units import format_bytes
from stagewright.service.answers import CARRIED, Answer, Finite, NotebookAnswer, ShownAnswer
from stagewright.service.layouts.problems import unusable, usable_degrees
from stagewright.service.requests import Request, SearchRequest

if TYPE_CHECKING:
    from stagewright.solvers.parallelism.profiles.pipelines import ProfiledResult

_MORE_MEMORY = (1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0, 64.0)
"""By how much memory is multiplied, one after the other, until a plan is found."""
LOOK_SECONDS = 3.0
"""Of each search with more memory."""


class ProfiledRequest(SearchRequest):
    """Find the plan of the least iteration time by measured layer profiles."""

    problem: ProfiledProblem


class CheckProfiledRequest(Request):
    """Compute the time and memory of a plan's document again."""

    document: ProfiledDocument


class ProfiledStageAnswer(Answer):
    """Layers [first, stop) on ``replicas`` groups of ``tensor`` devices; seconds per microbatch.

    ``pool`` is the position among the answer's pools, ``servers`` are numbers of its servers.
    """

    first: int
    stop: int
    pool: int
    device_kind: str
    zone: str
    replicas: int
    tensor: int
    forward_seconds: float
    backward_seconds: float
    reduce_seconds: float
    update_seconds: float
    memory_bytes: float
    capacity_bytes: float
    servers: tuple[int, ...]


class ProfiledPoolAnswer(Answer):
    """Servers of one kind, zone and size: devices used, and the fullest device's memory.

    ``peak_bytes`` is None if none is used.
    """

    device_kind: str
    zone: str
    servers: int
    per_server: int
    devices: int
    used: int
    peak_bytes: float | None
    capacity_bytes: float


class ProfiledAnswer(NotebookAnswer):
    """The best plan found, with a bound on every plan of ``plan_class`` that fits.

    ``microbatches`` are those of each pipeline. Without a plan ``reason`` says why.
    """

    status: Status
    iteration_seconds: Finite
    samples_per_second: Finite
    bound_seconds: Finite
    gap: Finite
    proved_by: str
    plan_class: str
    microbatch_size: int | None = None
    microbatches: tuple[int, ...] = ()
    stages: tuple[ProfiledStageAnswer, ...] = ()
    pools: tuple[ProfiledPoolAnswer, ...] = ()
    remarks: tuple[str, ...] = ()
    reason: str | None = None
    examined: int
    wall_seconds: float
    plan: Annotated[ProfiledDocument | None, CARRIED] = None

    def shown(self) -> ShownAnswer:
        """What a notebook shows."""
        from stagewright.service.layouts.told.measured import shown_profiled

        return shown_profiled(self)


class CheckProfiledAnswer(Answer):
    """What is wrong with a plan's document; nothing if it is valid.

    Its bound is compared with the time, but the search is not run again.
    """

    status: str
    iteration_seconds: float
    is_bound_verified: bool = False
    violations: tuple[str, ...]


def find_profiled_plan(request: ProfiledRequest, stop: StopToken | None = None) -> ProfiledAnswer:
    """The plan of the least iteration time within the limits."""
    from stagewright.solvers.parallelism.profiles.pipelines import profiled_plan

    problem, limits = request.problem, request.limits(stop)
    found = profiled_plan(problem, limits)
    plan, estimate = found.plan, found.estimate
    if plan is None or estimate is None:
        return _answer(
            found,
            iteration_seconds=None,
            samples_per_second=None,
            remarks=tuple(_remarks(problem)),
            reason=_reason(problem, found.status, limits),
        )
    bound = LayoutBound(found.bound, found.proved_by, found.plans)
    return _answer(
        found,
        iteration_seconds=estimate.seconds,
        samples_per_second=problem.batch / estimate.seconds if estimate.seconds else None,
        microbatch_size=plan.microbatch_size,
        microbatches=plan.microbatches,
        stages=tuple(_stages(problem, plan, estimate)),
        pools=tuple(_pools(problem, plan, estimate)),
        remarks=(*_remarks(problem), *_open(found, limits)),
        plan=profiled_document(problem, plan, estimate, bound),
    )


def _answer(found: "ProfiledResult", **fields: Any) -> ProfiledAnswer:
    """The answer with what the search proves, and other fields."""
    return ProfiledAnswer.of(
        found,
        **{"plan": None} | fields,
        bound_seconds=found.bound,
        plan_class=found.plans,
        examined=found.labels,
        wall_seconds=found.seconds,
    )


def check_profiled_plan(request: CheckProfiledRequest) -> CheckProfiledAnswer:
    """Evaluate a document's plan again, and compare."""
    found = violations(request.document)
    return CheckProfiledAnswer(
        status="invalid" if found else "valid",
        iteration_seconds=request.document.iteration_seconds,
        violations=found,
    )


def _reason(problem: ProfiledProblem, status: Status, limits: Limits) -> str:
    """Why there is no plan, and how much more memory a plan would need."""
    if status is not Status.INFEASIBLE:
        return "the search ended before a plan was found; give it more time"
    for factor in _MORE_MEMORY:
        if limits.stopped():
            break
        found = _with_memory(problem, factor, limits.stop)
        if found is not None:
            lacks = next(memory_shortages(problem, found, evaluate(problem, found)))
            return (
                f"no plan of the class fits in memory; with {factor:g} times the memory one does, "
                f"of which {lacks} ({format_bytes(problem.memory.reserve_bytes)} of it is "
                "the reserve)"
            )
    return "no plan of the class fits in memory"


def _with_memory(
    problem: ProfiledProblem, factor: float, stop: StopToken | None
) -> ProfiledPlan | None:
    from stagewright.solvers.parallelism.profiles.pipelines import profiled_plan

    pools = tuple(
        replace(pool, memory_bytes=factor * pool.memory_bytes) for pool in problem.cluster.pools
    )
    larger = replace(problem, cluster=replace(problem.cluster, pools=pools))
    return profiled_plan(larger, Limits(LOOK_SECONDS, stop=stop)).plan


def _remarks(problem: ProfiledProblem) -> Iterator[str]:
    """Remarks on the class of plans, on what was not measured and on unused pools."""
    pools = Counter(pool.device_kind for pool in problem.cluster.pools)
    for kind, number in pools.items():
        if number > 1:
            yield (
                f"{kind}: servers of another size or zone are a pool of their own, and all "
                f"replicas of a stage are in one pool; there are {number} pools"
            )
    for kind in pools:
        measured = [one for one in problem.profiles.measured if one.device_kind == kind]
        if not any(any(one.update_seconds) for one in measured):
            yield f"the profiles of {kind} have no time of the optimizer's step: it is taken as 0"
    for pool in problem.cluster.pools:
        if not usable_degrees(problem, pool):
            yield f"not used: {unusable(problem, pool)}"


def _open(found: "ProfiledResult", limits: Limits) -> Iterator[str]:
    """Why a search that had time left proved no optimum."""
    if found.status is Status.FEASIBLE and limits.left(found.seconds):
        yield (
            "more time would not close the gap: the bound takes the fastest link for every "
            "transfer and sum, and as many pipelines were listed as are allowed"
        )


def _stages(
    problem: ProfiledProblem, plan: ProfiledPlan, estimate: ProfiledEstimate
) -> Iterator[ProfiledStageAnswer]:
    """The stages of a plan; all replicas of a stage are in one pool and of one degree."""
    ends = [0, *np.cumsum([stage.layers for stage in plan.stages]).tolist()]
    for s, ((first, stop), stage) in enumerate(zip(pairwise(ends), plan.stages, strict=True)):
        one = stage.replicas[0]
        pool = problem.cluster.pools[one.pool]
        times = problem.times(one.pool, plan.microbatch_size, one.tensor)
        yield ProfiledStageAnswer.of(
            one,
            pool,
            first=first,
            stop=stop,
            replicas=len(stage.replicas),
            memory_bytes=estimate.memory_bytes[s],
            forward_seconds=float(times.forward[first:stop].sum()),
            backward_seconds=float(times.backward[first:stop].sum()),
            reduce_seconds=estimate.reduce_seconds[s],
            update_seconds=estimate.update_seconds[s],
            capacity_bytes=pool.memory_bytes,
            servers=tuple(replica.server for replica in stage.replicas),
        )


def _pools(
    problem: ProfiledProblem, plan: ProfiledPlan, estimate: ProfiledEstimate
) -> Iterator[ProfiledPoolAnswer]:
    for number, pool in enumerate(problem.cluster.pools):
        inside = [
            (one.tensor, used)
            for stage, used in zip(plan.stages, estimate.memory_bytes, strict=True)
            for one in stage.replicas
            if one.pool == number
        ]
        yield ProfiledPoolAnswer.of(
            pool,
            per_server=pool.devices,
            devices=pool.servers * pool.devices,
            used=sum(tensor for tensor, _ in inside),
            peak_bytes=max((used for _, used in inside), default=None),
            capacity_bytes=pool.memory_bytes,
        )
