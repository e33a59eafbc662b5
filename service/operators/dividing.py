"""Published partition problems: contiguous sets of operators, and Piper's pipelines."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Tag, model_validator

from stagewright.formulations.dags.latency import HOST, LatencyProblem, latency_problem
from stagewright.formulations.dags.piper import PiperProblem, PiperStage, in_flight, piper_problem
from stagewright.formulations.dags.problem import (
    DagProblem,
    layer_shortage,
    node_shortage,
    part_shortage,
)
from stagewright.formulations.dags.workloads import dag_problem, in_any_order, members
from stagewright.formulations.forms.answers import OnProgress, Status, StopToken, silent
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    MAX_DEVICES,
    parse_bandwidth,
    parse_bytes,
    require_count,
)
from stagewright.graphs.importers.dnn_partitioning import Workload
from stagewright.graphs.importers.piper import PiperWorkload, load_partition_problem
from stagewright.service.answers import Answer, Finite
from stagewright.service.options import Option
from stagewright.service.requests import SearchRequest, require_positive

_MOST_SAMPLES = 10**9
_ONE_CALL = "placements with one contiguous call for each accelerator"
_CONTIGUOUS = "contiguous sets of operators"
ANY = "sets of operators, contiguous or not"
PIPELINES = "pipelines of contiguous sets, with replicas, shards and recomputation"


def _parts_of(workload: object) -> str:
    """``layers`` for a workload of Piper, ``operators`` for one of dnn-partitioning."""
    of_layers = isinstance(workload, dict) and "mbsInBatch" in workload
    return "layers" if of_layers or isinstance(workload, PiperWorkload) else "operators"


class DivideRequest(SearchRequest):
    """Divide a published workload among devices; what is not given is as in its file."""

    workload: Annotated[
        Annotated[Workload, Tag("operators")] | Annotated[PiperWorkload, Tag("layers")],
        Discriminator(_parts_of),
        Option("FILE", of_file=load_partition_problem),
    ]
    """A workload of dnn-partitioning or of Piper (JSON)."""
    devices: Annotated[int | None, Option(form="N")] = None
    """Devices; default: as in the file."""
    memory_bytes: Annotated[float | None, Option("--memory", form="SIZE", of_text=parse_bytes)] = (
        None
    )
    """Memory of a device; default: as in the file."""
    hosts: int | None = None
    """dnn-partitioning: processors besides; default: as in the file; with objective latency only 0:
    none, else hosts keep no node waiting."""
    any_sets: bool = False
    """dnn-partitioning: sets need not be contiguous."""
    replicas: Annotated[int, Option(form="N")] = 1
    """dnn-partitioning: the most devices of a set; they exchange gradients at the bandwidth."""
    objective: Literal["load", "phases", "latency"] = "load"
    """dnn-partitioning: the largest load; the largest forward load plus the largest backward load
    (phases), of a pipeline that does all forwards first; or the time of one sample (latency), with
    one call for each accelerator."""
    bandwidth_bytes_per_second: Annotated[
        float | None, Option("--bandwidth", of_text=parse_bandwidth)
    ] = None
    """Of a device, such as 25GB/s; Piper: default as in the file; dnn-partitioning: with
    replicas."""
    samples: int | None = None
    """Piper: samples in a batch; default: as in the file."""

    @model_validator(mode="after")
    def _require_amounts(self) -> Self:
        for name, most in (("devices", MAX_DEVICES), ("samples", _MOST_SAMPLES)):
            if getattr(self, name) is not None:
                require_count(getattr(self, name), name, most)
        require_count(self.replicas, "replicas", MAX_DEVICES)
        if self.hosts is not None and self.hosts < 0:
            raise InputError(f"hosts must not be negative, got {self.hosts}")
        if self.hosts:
            require_count(self.hosts, "hosts", MAX_DEVICES)
        for name in ("memory_bytes", "bandwidth_bytes_per_second"):
            if getattr(self, name) is not None:
                require_positive(getattr(self, name), name, "positive and finite")
        return self


class DividedSet(Answer):
    """What one device, or the ``replicas`` x ``shards`` devices of a stage, computes.

    ``seconds``: its time between two samples; ``memory_bytes``: on each of its devices.
    ``options`` has the way in which each layer is computed.
    """

    device: str
    nodes: tuple[str, ...]
    seconds: float
    memory_bytes: float
    replicas: int = 1
    shards: int = 1
    options: tuple[str, ...] | None = None


class DivideAnswer(Answer):
    """The division of least time between two samples, and a bound on that of every other one.

    With the objective ``latency`` it is the time of one sample, and the ``seconds`` of a set are
    those of its call, or those until the last node on a host is done.

    ``sets`` are in the order of the pipeline, or of the ends of the calls; None if there are none,
    with the ``reason`` if it is known. The claim is about ``plan_class``.
    """

    status: Status
    cost_seconds: Finite
    bound_seconds: Finite
    gap: Finite
    proved_by: str
    plan_class: str
    reason: str | None
    sets: tuple[DividedSet, ...] | None
    wall_seconds: float


def divide(
    request: DivideRequest, on_progress: OnProgress = silent, stop: StopToken | None = None
) -> DivideAnswer:
    """The best division that is found in time. Raises InputError as `problem_of`."""
    problem = problem_of(request)
    if isinstance(problem, PiperProblem):
        return _layers(request, problem, stop)
    if isinstance(problem, LatencyProblem):
        return _latency(request, problem, on_progress, stop)
    return _operators(request, problem, on_progress, stop)


def problem_of(request: DivideRequest) -> DagProblem | LatencyProblem | PiperProblem:
    """What :func:`divide` solves.

    Raises
    ------
    InputError
        If something is asked that the kind of workload does not have, or it makes no problem.
    """
    if isinstance(request.workload, PiperWorkload):
        _refuse(request, "workloads of operators", "hosts", "any_sets", "replicas", "objective")
        return piper_problem(
            request.workload,
            devices=request.devices,
            memory=request.memory_bytes,
            bandwidth=request.bandwidth_bytes_per_second,
            samples=request.samples,
        )
    _refuse(request, "Piper's workloads", "samples")
    if request.objective == "latency":
        _require_latency(request)
        return latency_problem(_asked(request))
    _require_sets(request)
    return dag_problem(
        _asked(request),
        most_replicas=request.replicas,
        bandwidth=request.bandwidth_bytes_per_second,
    )


def _refuse(request: DivideRequest, owner: str, *names: str) -> None:
    for name in names:
        if getattr(request, name) != DivideRequest.model_fields[name].default:
            raise InputError(f"{name} is for {owner}")


def _require_sets(request: DivideRequest) -> None:
    """Refuse options that contradict each other for sets of operators."""
    bandwidth = request.bandwidth_bytes_per_second
    if request.replicas > 1 and bandwidth is None:
        raise InputError(
            "replicas exchange gradients: give the bandwidth of a device, for example 12GB/s"
        )
    if request.replicas == 1 and bandwidth is not None:
        raise InputError(
            "a bandwidth is for replicas, or for Piper's workloads: a workload of operators has "
            "the seconds of its transfers"
        )
    if request.any_sets and (request.replicas > 1 or request.objective != "load"):
        raise InputError("any_sets goes with one replica of each set and the objective 'load'")


def _require_latency(request: DivideRequest) -> None:
    """Refuse options that do not apply to the objective latency."""
    for name in ("any_sets", "replicas", "bandwidth_bytes_per_second"):
        if getattr(request, name) != DivideRequest.model_fields[name].default:
            raise InputError(f"{name} does not apply to the objective 'latency'")
    if request.hosts:
        raise InputError(
            "with the objective 'latency' hosts keep no node waiting: give hosts 0, or none"
        )


def _latency(
    request: DivideRequest, problem: LatencyProblem, on_progress: OnProgress, stop: StopToken | None
) -> DivideAnswer:
    from stagewright.solvers.dags.latency import place_for_latency
    from stagewright.solvers.dags.warm_up import compile_latency

    compile_latency()
    found = place_for_latency(problem, request.limits(stop), on_progress)
    return DivideAnswer.of(
        found,
        cost_seconds=found.cost,
        bound_seconds=None if found.bound == inf else found.bound,
        plan_class=_ONE_CALL,
        reason=node_shortage(problem) if found.home is None else None,
        sets=None if found.home is None else tuple(_calls(problem, found.home)),
        wall_seconds=found.seconds,
    )


def _calls(problem: LatencyProblem, home: Sequence[int]) -> Iterator[DividedSet]:
    """The calls of accelerators in the order of their ends, and the nodes on hosts."""
    done, took = problem.done(home), problem.call_seconds(home)
    members: dict[int, list[int]] = {}
    for v in sorted(range(len(home)), key=lambda v: (home[v] == HOST, done[v])):
        members.setdefault(home[v], []).append(v)
    for device, nodes in members.items():
        hosted = device == HOST
        yield DividedSet(
            device="hosts" if hosted else "accelerator",
            nodes=tuple(problem.names[v] for v in sorted(nodes)),
            seconds=max(done[v] for v in nodes) if hosted else took[device],
            memory_bytes=float(problem.bytes[nodes].sum()),
        )


def _asked(request: DivideRequest) -> Workload:
    """The workload of operators with what the request gives in place of its file."""
    assert isinstance(request.workload, Workload)
    asked = {
        "max_devices": request.devices,
        "max_bytes": request.memory_bytes,
        "max_hosts": request.hosts,
    }
    return request.workload.model_copy(update={k: v for k, v in asked.items() if v is not None})


def _operators(
    request: DivideRequest, problem: DagProblem, on_progress: OnProgress, stop: StopToken | None
) -> DivideAnswer:
    from stagewright.solvers.dags.free import free_partition
    from stagewright.solvers.dags.partition import partition
    from stagewright.solvers.dags.phases import partition_phases
    from stagewright.solvers.dags.warm_up import compile_partition

    workload = _asked(request)
    limits = request.limits(stop)
    compile_partition()
    solve = partition if request.objective == "load" else partition_phases
    found = solve(problem, limits, on_progress)
    spent = found.seconds
    if request.any_sets:
        problem = dag_problem(workload, contiguous=False)
        start = None if found.sets is None else in_any_order(workload, found.sets)
        left = replace(limits, seconds=limits.left(spent))
        found = free_partition(problem, replace(found, sets=start), left, on_progress)
        spent += found.seconds
    names = members(workload, not request.any_sets)
    sets = (
        None
        if found.sets is None
        else tuple(
            DividedSet(
                device=problem.pools[one.pool].name,
                nodes=tuple(name for part in one.parts for name in names[part]),
                seconds=problem.load(one.parts, one.pool, one.replicas),
                memory_bytes=float(problem.bytes[list(one.parts)].sum()),
                replicas=one.replicas,
            )
            for one in found.sets
        )
    )
    reason = part_shortage(problem) if sets is None else None
    return DivideAnswer.of(
        found,
        status=found.status if reason is None else Status.INFEASIBLE,
        cost_seconds=found.cost,
        bound_seconds=found.bound,
        plan_class=_class(request),
        reason=reason,
        sets=sets,
        wall_seconds=spent,
    )


def _class(request: DivideRequest) -> str:
    if request.any_sets:
        return ANY
    several = f" with up to {request.replicas} replicas" if request.replicas > 1 else ""
    return _CONTIGUOUS + several


def _layers(request: DivideRequest, problem: PiperProblem, stop: StopToken | None) -> DivideAnswer:
    from stagewright.solvers.dags.piper import piper_pipeline
    from stagewright.solvers.dags.warm_up import compile_piper

    compile_piper()
    found = piper_pipeline(problem, request.limits(stop))
    reason = layer_shortage(problem) if found.stages is None else None
    return DivideAnswer.of(
        found,
        status=found.status if reason is None else Status.INFEASIBLE,
        cost_seconds=found.cost,
        bound_seconds=found.bound,
        plan_class=PIPELINES,
        reason=reason,
        sets=None if found.stages is None else tuple(_stages(problem, found.stages)),
        wall_seconds=found.seconds,
    )


def _stages(problem: PiperProblem, stages: Sequence[PiperStage]) -> Iterator[DividedSet]:
    for stage, count in zip(stages, in_flight(stages), strict=True):
        chosen = zip(stage.layers, stage.options, strict=True)
        yield DividedSet(
            device="device",
            nodes=tuple(problem.layers[v].name for v in stage.layers),
            seconds=problem.stage_seconds(stage),
            memory_bytes=problem.stage_bytes(stage, count),
            replicas=stage.replicas,
            shards=stage.shards,
            options=tuple(problem.layers[v].options[stage.shards][k].name for v, k in chosen),
        )
