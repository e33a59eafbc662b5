"""Plan the operators of a step: a method, or search and optimum; checked and certified."""

from dataclasses import dataclass

from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.operators.bounds import shortage
from stagewright.formulations.operators.check import certificate, require_valid
from stagewright.formulations.operators.plan import (
    OperatorBound,
    OperatorPlan,
    PlacedOperator,
    SplitChoice,
    Transfer,
    digest_of,
)
from stagewright.formulations.operators.problem import Contention, OperatorProblem, Timetable
from stagewright.formulations.operators.step import operator_problem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.step_graph import StepGraph
from stagewright.solvers.operators.bounds import bounds_of
from stagewright.solvers.operators.exact import solve_exactly
from stagewright.solvers.operators.os_dpos import os_dpos
from stagewright.solvers.operators.search import METHODS

SPLITTING, SEARCHING = "os-dpos", "search"
PLANNERS = (*METHODS, SPLITTING, SEARCHING)


@dataclass(frozen=True, slots=True)
class PlannedOperators:
    """A checked plan; without one the ``reason`` why there is none."""

    plan: OperatorPlan | None
    status: Status
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What a planner found, for the graph after ``splits``."""

    problem: OperatorProblem
    timetable: Timetable | None
    bounds: tuple[OperatorBound, ...]
    status: Status
    splits: tuple[SplitChoice, ...] = ()
    reason: str = ""


def plan_operators(
    graph: StepGraph,
    cluster: Cluster,
    planner: str = SEARCHING,
    contention: Contention = "none",
    limits: Limits | None = None,
) -> PlannedOperators:
    """The plan of one of ``PLANNERS``; ``search`` is never longer than the methods without splits.

    Raises
    ------
    InputError
        If there is no such planner.
    """
    if planner not in PLANNERS:
        raise InputError(f"unknown planner {planner!r}; there are {', '.join(PLANNERS)}")
    found = _find(graph, cluster, planner, contention, limits or Limits())
    if found.timetable is None:
        return PlannedOperators(None, found.status, found.reason)
    cost = found.problem.evaluate(found.timetable)
    problem, timetable = found.problem, found.timetable
    plan = OperatorPlan(
        digest=digest_of(graph, cluster, contention),
        planner=planner,
        contention=contention,
        operators=_placed(problem, timetable),
        transfers=_transfers(problem, timetable),
        splits=found.splits,
        certificate=certificate(cost, found.bounds),
        unmeasured=problem.unmeasured,
    )
    require_valid(graph, cluster, plan)
    return PlannedOperators(plan, found.status)


def _find(
    graph: StepGraph, cluster: Cluster, planner: str, contention: Contention, limits: Limits
) -> _Found:
    problem = operator_problem(graph, cluster, contention)
    reason = shortage(problem)
    if reason is not None:
        return _Found(problem, None, (), Status.INFEASIBLE, reason=reason)
    if planner == SEARCHING:
        result = solve_exactly(problem, limits)
        return _Found(problem, result.timetable, result.bounds, result.status, reason=result.reason)
    splits: tuple[SplitChoice, ...] = ()
    if planner == SPLITTING:
        split = os_dpos(graph, cluster, contention)
        problem, timetable, splits = split.problem, split.timetable, split.splits
    else:
        timetable = METHODS[planner](problem)
    status = limits.status(found=timetable is not None)
    reason = "" if timetable is not None else f"{planner} finds nothing that fits in memory"
    return _Found(problem, timetable, bounds_of(problem), status, splits, reason)


def _placed(problem: OperatorProblem, timetable: Timetable) -> tuple[PlacedOperator, ...]:
    return tuple(
        PlacedOperator(
            problem.names[i],
            problem.devices[timetable.device[i]],
            float(timetable.start[i]),
            float(timetable.finish[i]),
        )
        for i in timetable.order.tolist()
    )


def _transfers(problem: OperatorProblem, timetable: Timetable) -> tuple[Transfer, ...]:
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
