"""The partition of least bottleneck (BPPM), by the recurrence or as an integer program."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic

from stagewright.formulations.forms.answers import Limits, Status, StopToken
from stagewright.formulations.forms.models import LinearProgram
from stagewright.formulations.pipelines.bppm import BalancedPartition, StageChoice
from stagewright.formulations.pipelines.bppm_milp import ByAssignment
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.service.pipelines.answers import (
    PartitionAnswer,
    PartitionChoice,
    PlacedStageAnswer,
)
from stagewright.service.pipelines.requests import PartitionRequest
from stagewright.solvers.backends.backend import BACKENDS, solve
from stagewright.solvers.pipelines.partition.passes import PartitionSearch

RECURRENCE = "recurrence"
_MOST_COLUMNS = 200_000  # of the integer program; larger ones take minutes to write down

_Settle = Callable[[int, Limits], PartitionChoice]


def partition(request: PartitionRequest, stop: StopToken | None = None) -> PartitionAnswer:
    """The least bottleneck for one number of stages, or for each.

    Raises
    ------
    InputError
        If no such backend takes integer programs, or the program is too large for it.
    """
    began, limits = monotonic(), request.limits(stop)
    question = require_method(request)
    problem = question.problem
    settle = _method(question, request.backend, limits)
    found = []
    for count in _counts(request, question):
        left = replace(limits, seconds=limits.left(monotonic() - began))
        found.append(settle(count, left))
    return PartitionAnswer(
        status=_status([one.status for one in found]),
        backend=request.backend,
        model=problem.chain.name,
        cluster=problem.cluster.name,
        microbatches=problem.microbatches,
        order=tuple(problem.cluster.devices[v].name for v in question.order),
        wall_seconds=monotonic() - began,
        partitions=tuple(found),
    )


def require_method(request: PartitionRequest) -> BalancedPartition:
    """The question; refuses a backend that cannot answer it. Raises InputError as `partition`."""
    problem = request.problem
    usable = int(problem.replicas_per_layer.sum())  # every device of the order gets a stage
    question = BalancedPartition(problem, recursive_device_order(problem.cluster)[:usable])
    if request.backend != RECURRENCE:
        able = [it.name for it in BACKENDS.values() if it.accepts is LinearProgram]
        if request.backend not in able:
            known = ", ".join((RECURRENCE, *able))
            raise InputError(f"backend {request.backend!r} is none of {known}")
        for count in _counts(request, question):
            _require_small(question, count, request.backend)
    return question


def _counts(request: PartitionRequest, question: BalancedPartition) -> Sequence[int]:
    """The numbers of stages that are asked for."""
    most = min(len(question.problem.chain), len(question.order))
    return [request.stages] if request.stages else range(1, most + 1)


def _method(question: BalancedPartition, backend: str, limits: Limits) -> _Settle:
    if backend == RECURRENCE:
        return partial(_by_recurrence, question, PartitionSearch(question, limits=limits))
    return partial(_by_program, question, backend)


def _by_recurrence(
    question: BalancedPartition, search: PartitionSearch, count: int, limits: Limits
) -> PartitionChoice:
    found = search.solve(count)
    if found is not None:
        return _choice(question, count, Status.OPTIMAL, found.stages, found.bound_seconds)
    status = limits.status(found=False) if search.is_over else Status.INFEASIBLE
    return _choice(question, count, status, None, None)


def _by_program(
    question: BalancedPartition, backend: str, count: int, limits: Limits
) -> PartitionChoice:
    if limits.seconds <= 0:
        return _choice(question, count, limits.status(found=False), None, None)
    formulation = ByAssignment(count)
    answer = solve(formulation.apply(question), backend, limits)
    stages = None if answer.values is None else formulation.invert(question, answer.values)
    bound = None if answer.status is Status.INFEASIBLE else answer.bound
    return _choice(question, count, answer.status, stages, bound)


def _require_small(question: BalancedPartition, count: int, backend: str) -> None:
    """Refuse integer programs with too many columns."""
    layers, devices = len(question.problem.chain), len(question.order)
    columns = count * layers * devices**2 * (layers / 4 + devices / 6)
    if columns > _MOST_COLUMNS:
        raise InputError(
            f"backend {backend!r}: {count} stages of {layers} layers on {devices} devices make a "
            f"program of some {columns:.0g} columns, {_MOST_COLUMNS} are the most; use "
            f"{RECURRENCE!r}"
        )


def _choice(
    question: BalancedPartition,
    count: int,
    status: Status,
    stages: Sequence[StageChoice] | None,
    bound: float | None,
) -> PartitionChoice:
    devices = question.problem.cluster.devices
    cost = None if stages is None else question.evaluate(stages)
    bound = bound if bound is None or cost is None else min(bound, cost)
    return PartitionChoice(
        count=count,
        status=status,
        bottleneck_seconds=cost,
        bound_seconds=bound,
        gap=(cost - bound) / cost if cost and bound is not None else None,
        stages=stages
        and tuple(
            PlacedStageAnswer(
                layers=(one.start, one.stop), devices=tuple(devices[v].name for v in one.devices)
            )
            for one in stages
        ),
    )


def _status(found: Sequence[Status]) -> Status:
    """The status of the whole answer, from those of each number of stages."""
    if all(one is Status.INFEASIBLE for one in found):
        return Status.INFEASIBLE
    if all(one in (Status.OPTIMAL, Status.INFEASIBLE) for one in found):
        return Status.OPTIMAL
    unsettled = [one for one in found if one not in (Status.OPTIMAL, Status.INFEASIBLE)]
    return unsettled[0]
