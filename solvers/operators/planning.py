"""Plan the operators of a step: a method, or search and optimum; checked and certified."""

from dataclasses import dataclass, replace
from time import perf_counter

from stagewright.formulations.forms.answers import (
    Limits,
    OnProgress,
    Progress,
    Status,
    settled,
    silent,
)
from stagewright.formulations.operators.bounds import shortage
from stagewright.formulations.operators.check import certificate, expected, require_valid
from stagewright.formulations.operators.plan import (
    OperatorBound,
    OperatorPlan,
    PlacedOperator,
    Plans,
    SplitChoice,
    Transfer,
    digest_of,
    operator_problem,
)
from stagewright.formulations.operators.problem import Contention, GraphTimes, OperatorProblem
from stagewright.formulations.operators.splitting import split_graph
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.operators.step_graph import StepGraph
from stagewright.solvers.operators.exact import solve_exactly
from stagewright.solvers.operators.names import FASTT, PIPELINE, PLANNERS, SEARCHING, SPLITTING
from stagewright.solvers.operators.os_dpos import os_dpos
from stagewright.solvers.operators.pipelined import pipelined
from stagewright.solvers.operators.ranks import bounds_of
from stagewright.solvers.operators.search import METHODS

_ANY_SPLITS: Plans = "any splits"


@dataclass(frozen=True, slots=True)
class PlannedOperators:
    """A checked plan; without one the ``reason`` why there is none."""

    plan: OperatorPlan | None
    status: Status
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _FoundTimetable:
    """The timetable of a planner, for the graph after ``splits``."""

    problem: OperatorProblem
    timetable: GraphTimes | None
    bounds: tuple[OperatorBound, ...]
    status: Status
    splits: tuple[SplitChoice, ...] = ()
    reason: str = ""


def require_planner(name: str) -> None:
    """Refuse an unknown planner."""
    if name not in PLANNERS:
        raise InputError(f"unknown planner {name!r}; there are {', '.join(PLANNERS)}")


def plan_operators(
    graph: StepGraph,
    cluster: Cluster,
    planner: str = FASTT,
    contention: Contention = "none",
    limits: Limits | None = None,
    on_progress: OnProgress = silent,
) -> PlannedOperators:
    """The plan of one of ``PLANNERS``; ``fastt`` is never longer than any other.

    A plan is optimal if no plan with the same splits is shorter, whatever others promise: see
    ``any_splits_gap`` of its certificate. ``on_progress`` receives the seconds of the best
    placement so far, and the bound on plans with any splits.

    Raises InputError if there is no such planner.
    """
    require_planner(planner)
    limits = limits or Limits()
    found = _find(graph, cluster, planner, contention, limits, on_progress)
    problem, timetable = found.problem, found.timetable
    if timetable is None:
        return PlannedOperators(None, found.status, found.reason)
    cost = problem.evaluate(timetable)
    critical, peaks = expected(problem, timetable)
    stated = certificate(cost, found.bounds)
    plan = OperatorPlan(
        digest=digest_of(graph, cluster, contention),
        structure=graph.structure(),
        model=graph.name,
        cluster=cluster.name,
        planner=planner,
        contention=contention,
        operators=_placed(split_graph(graph, found.splits), problem, timetable),
        transfers=_transfers(problem, timetable),
        critical=critical,
        peak_memory_bytes=peaks,
        splits=found.splits,
        certificate=stated,
        unmeasured=problem.unmeasured,
    )
    require_valid(graph, cluster, plan)
    status = settled(limits.status(found=True), cost, stated.bound_seconds)
    return PlannedOperators(plan, status)


def _find(
    graph: StepGraph,
    cluster: Cluster,
    planner: str,
    contention: Contention,
    limits: Limits,
    on_progress: OnProgress,
) -> _FoundTimetable:
    began = perf_counter()
    problem = operator_problem(graph, cluster, contention)
    short = shortage(problem)
    if short is not None:
        line = graph.nodes[graph.index[short.operator]].line if short.operator else None
        reason = ": ".join(filter(None, (line, short.reason)))
        return _FoundTimetable(problem, None, (), Status.INFEASIBLE, reason=reason)
    if planner == FASTT:
        divided = _find(graph, cluster, SPLITTING, contention, limits, on_progress)
        left = replace(limits, seconds=limits.left(perf_counter() - began))
        whole = _find(graph, cluster, SEARCHING, contention, left, on_progress)
        return _better(divided, whole)
    any_splits = max(one.seconds for one in bounds_of(problem) if one.plans == _ANY_SPLITS)

    def tell(seconds: float) -> None:
        on_progress(Progress(perf_counter() - began, seconds, any_splits))

    if planner == SEARCHING:
        result = solve_exactly(problem, limits, tell)
        return _FoundTimetable(
            problem, result.timetable, result.bounds, result.status, reason=result.reason
        )
    splits: tuple[SplitChoice, ...] = ()
    if planner == SPLITTING:
        split = os_dpos(graph, cluster, contention)
        problem, timetable, splits = split.problem, split.timetable, split.splits
    elif planner == PIPELINE:
        timetable = pipelined(graph, problem, limits)
    else:
        timetable = METHODS[planner](problem)
    if timetable is not None:
        tell(timetable.end)
    status = limits.status(found=timetable is not None)
    reason = "" if timetable is not None else f"{planner} finds nothing that fits in memory"
    return _FoundTimetable(problem, timetable, bounds_of(problem), status, splits, reason)


def _better(split: _FoundTimetable, whole: _FoundTimetable) -> _FoundTimetable:
    """The shorter one; ``whole`` if they are equally long."""
    if split.timetable is None:
        return whole
    is_shorter = whole.timetable is None or split.timetable.end < whole.timetable.end
    return split if is_shorter else whole


def _placed(
    graph: StepGraph, problem: OperatorProblem, timetable: GraphTimes
) -> tuple[PlacedOperator, ...]:
    return tuple(
        PlacedOperator(
            problem.names[i],
            graph.nodes[i].role,
            problem.devices[timetable.device[i]],
            float(timetable.start[i]),
            float(timetable.finish[i]),
        )
        for i in timetable.order.tolist()
    )


def _transfers(problem: OperatorProblem, timetable: GraphTimes) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(
            problem.names[problem.maker[t]],
            int(problem.output[t]),
            problem.devices[timetable.target[k]],
            float(timetable.sent_start[k]),
            float(timetable.sent_finish[k]),
        )
        for k, t in enumerate(timetable.sent.tolist())
    )
