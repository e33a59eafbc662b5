"""Placements of operators: from a graph and a cluster to a certified plan."""

from dataclasses import asdict
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

from stagewright.executor.programs.trace import Trace
from stagewright.formulations.checking.order import Violation
from stagewright.formulations.forms.answers import OnProgress, StopToken, silent
from stagewright.formulations.operators.plan import OperatorPlan, digest_of, loads_of
from stagewright.formulations.operators.problem import Contention
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.operators.step_graph import WITHOUT_TIME, StepGraph
from stagewright.service.answers import CARRIED, Answer, Finite
from stagewright.service.pipelines.answers import IterationAnswer, PairAnswer, ViolationAnswer
from stagewright.service.requests import Request, SearchRequest

if TYPE_CHECKING:
    from stagewright.executor.measuring.operator_runs import OperatorComparison
else:  # carried, not validated: its library is slow to import
    OperatorComparison = Any


class ComparePlacementRequest(Request):
    """Compare the prediction of a plan of operators with the trace of a run of it."""

    plan: OperatorPlan
    trace: Trace


class TotalAnswer(Answer):
    """The sum of the seconds of several operators or transfers."""

    count: int
    seconds: PairAnswer


class PlacementCompareAnswer(Answer):
    """The predictions of a plan and the measurements of a run of it.

    ``kinds`` are the roles in the step and the transfers; ``devices`` is what each computes.
    """

    status: str = "compared"
    machine: str
    backend: str
    world_size: int
    dtype: str
    steps: int
    iteration_seconds: IterationAnswer
    kinds: dict[str, TotalAnswer]
    devices: dict[str, TotalAnswer]
    comparison: Annotated[OperatorComparison, CARRIED]


def compare(request: ComparePlacementRequest) -> PlacementCompareAnswer:
    """A plan's prediction and what a run of it measured."""
    from stagewright.executor.measuring.operator_runs import compare_operators

    found = compare_operators(request.plan, request.trace)
    return PlacementCompareAnswer.of(
        found,
        request.trace,
        iteration_seconds=IterationAnswer.of(
            found.iteration_seconds, least=found.least_seconds, most=found.most_seconds
        ),
        comparison=found,
    )


class PlaceRequest(SearchRequest):
    """Place the operators of a training step, by one of ``solvers.operators.planning.PLANNERS``."""

    graph: StepGraph
    cluster: Cluster
    planner: str = "fastt"
    contention: Contention = "none"


class CheckPlacementRequest(Request):
    """Check a plan of operators for the graph and the cluster that it is for."""

    plan: OperatorPlan
    graph: StepGraph
    cluster: Cluster


class DeviceAnswer(Answer):
    """What a device does in a step: seconds of its operators, and the most bytes in its memory."""

    device: str
    operators: int
    busy_seconds: float
    peak_memory_bytes: float


class PlacementSummary(Answer):
    """A placement of operators; without one most fields are None.

    ``gap`` is over the plans with the same splits, ``any_splits_gap`` over all.
    """

    model: str
    cluster: str
    planner: str
    contention: Contention
    cost_seconds: float | None = None
    bound_seconds: Finite = None
    gap: Finite = None
    proved_by: str | None = None
    any_splits_seconds: Finite = None
    any_splits_gap: Finite = None
    any_splits_proved_by: str | None = None
    operators: int | None = None
    transfers: int | None = None
    critical: int | None = None
    unmeasured: int | None = None
    splits: tuple[dict[str, Any], ...] = ()
    devices: tuple[DeviceAnswer, ...] = ()


class PlaceAnswer(PlacementSummary):
    """The answer to a :class:`PlaceRequest`."""

    status: str
    reason: str
    wall_seconds: float
    plan: OperatorPlan | None = CARRIED


class PlacementCheckAnswer(Answer):
    """Every rule that a plan breaks."""

    status: Literal["valid", "invalid"]
    cost_seconds: float | None
    violations: tuple[ViolationAnswer, ...]
    found: tuple[Violation, ...] = CARRIED


def place(
    request: PlaceRequest, stop: StopToken | None = None, on_progress: OnProgress = silent
) -> PlaceAnswer:
    """Place; infeasible and interrupted are answers.

    ``on_progress`` is told of the best placement so far, and of a bound on all plans.

    Raises
    ------
    InputError
        If there is no such planner, or the graph has no time on a kind of device of the cluster.
    """
    from stagewright.solvers.operators.planning import plan_operators

    require_placeable(request)
    began = monotonic()
    found = plan_operators(
        request.graph,
        request.cluster,
        request.planner,
        request.contention,
        request.limits(stop),
        on_progress,
    )
    if found.plan is None:
        names = {"model": request.graph.name, "cluster": request.cluster.name}
        figures = PlacementSummary.of(request, **names)
    else:
        figures = summary(found.plan)
    return PlaceAnswer.of(figures, found, wall_seconds=monotonic() - began)


def require_placeable(request: PlaceRequest) -> None:
    """Refuse what :func:`place` refuses."""
    from stagewright.solvers.operators.planning import require_planner

    require_planner(request.planner)
    _require_times(request.graph, request.cluster)


def _require_times(graph: StepGraph, cluster: Cluster) -> None:
    """Refuse a cluster with a kind of device for which the graph has no times."""
    known = {kind for node in graph.nodes for kind in node.seconds}
    if not known:
        raise InputError(
            f"graph {graph.name!r} has no times: capture it with --measure or --device, or "
            "let `train` learn them, from a first plan on one device or data parallel"
        )
    for device in cluster.devices:
        if device.kind not in known:
            raise InputError(
                f"graph {graph.name!r} has no times on {device.kind!r}, as {device.name} is; it "
                f"has them on {', '.join(sorted(known))}"
            )
        _require_times_on(graph, device.kind)


def _require_times_on(graph: StepGraph, kind: str) -> None:
    """Refuse operators that have no time on a kind of device."""
    computed = [node for node in graph.nodes if node.role not in WITHOUT_TIME]
    missing = [node for node in computed if kind not in node.seconds]
    if missing:
        first, *others = missing
        more = f" and {len(others)} others" if others else ""
        there = ", ".join(sorted(first.seconds)) or "no kind"
        raise InputError(
            f"operator {first.name!r}{more} of graph {graph.name!r} has no time on {kind!r} (it "
            f"has one on {there}); capture it with --device {kind}, or let `train` learn it"
        )


def check(request: CheckPlacementRequest) -> PlacementCheckAnswer:
    """Every rule that the plan breaks.

    Raises
    ------
    InputError
        If the plan is for another graph or cluster.
    """
    from stagewright.formulations.operators.check import check as check_plan
    from stagewright.formulations.operators.check import require_valid

    plan, graph, cluster = request.plan, request.graph, request.cluster
    if not plan.answers(digest_of(graph, cluster, plan.contention)):
        raise InputError(
            f"the plan is for another problem: it was made for {plan.model} on {plan.cluster}, and "
            f"its digest is not that of {graph.name} and {cluster.name}"
        )
    found = check_plan(graph, cluster, plan)
    return PlacementCheckAnswer(
        status="invalid" if found else "valid",
        cost_seconds=None if found else require_valid(graph, cluster, plan),
        violations=found,
        found=found,
    )


def summary(plan: OperatorPlan) -> PlacementSummary:
    """The main figures of a plan."""
    return PlacementSummary.of(
        plan,
        plan.certificate,
        operators=len(plan.operators),
        transfers=len(plan.transfers),
        critical=len(plan.critical),
        unmeasured=len(plan.unmeasured),
        splits=tuple(asdict(one) for one in plan.splits),
        devices=loads_of(plan),
    )
