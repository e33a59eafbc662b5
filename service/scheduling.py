"""Scheduling problems in plain numbers: pipelines of fixed stages, and job shops."""

from typing import TYPE_CHECKING, Any

import numpy as np

from stagewright.formulations.forms.answers import OnProgress, StopToken, silent
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.pipelines.timed_rows import timed_rows
from stagewright.service.pipeline_answers import JobShopAnswer, ScheduleAnswer
from stagewright.service.pipeline_requests import JobShopRequest, ScheduleRequest

if TYPE_CHECKING:
    from stagewright.solvers.pipelines.scheduling import ScheduleResult


def schedule(
    request: ScheduleRequest, on_progress: OnProgress = silent, stop: StopToken | None = None
) -> ScheduleAnswer:
    """The schedule of one rule, or the best that is found and proved in time."""
    from stagewright.solvers.pipelines.scheduling import solve_schedule

    problem = request.problem
    result = solve_schedule(problem, request.kind, request.limits(stop), on_progress)
    return ScheduleAnswer(
        status=result.status,
        planner=request.kind,
        stages=problem.stages,
        microbatches=problem.microbatches,
        makespan=_plain(result.cost),
        bound=_plain(result.bound),
        # The names that every answer has; the unit is the request's.
        cost_seconds=_plain(result.cost),
        bound_seconds=_plain(result.bound),
        gap=result.gap,
        proved_by=result.proved_by,
        wall_seconds=result.seconds,
        **_timetable_fields(problem, result),
        problem=problem,
        result=result,
    )


def jobshop(
    request: JobShopRequest, on_progress: OnProgress = silent, stop: StopToken | None = None
) -> JobShopAnswer:
    """The shortest schedule of a job shop that is found in time."""
    from stagewright.formulations.pipelines.jobshop import JobShop
    from stagewright.solvers.pipelines.jobshop import solve_jobshop

    problem = JobShop(request.jobs)
    result = solve_jobshop(problem, request.limits(stop), on_progress)
    return JobShopAnswer(
        status=result.status,
        makespan=result.cost,
        bound=result.bound,
        cost_seconds=result.cost,
        bound_seconds=result.bound,
        gap=result.gap,
        proved_by=result.proved_by,
        wall_seconds=result.seconds,
        jobs=len(problem.jobs),
        machines=len({machine for steps in problem.jobs for machine, _ in steps}),
        starts=result.starts,
    )


def _plain(value: float | None) -> float | int | None:
    """A whole number as an int, so that integers stay integers."""
    return int(value) if value is not None and float(value).is_integer() else value


def _timetable_fields(problem: MakespanProblem, result: "ScheduleResult") -> dict[str, Any]:
    """The bubble, and each device's actions in order with their starts; or why there are none.

    The bubble is the idle time of the busiest device as a fraction of its work, which with equal
    stages and no transfers is (S - 1) / M for GPipe and 1F1B (Narayanan's thesis, 4.2.2).
    """
    if result.timetable is None:
        reason = _reason(problem, result.source)
        return {"reason": reason, "bubble": None, "order": None, "starts": None}
    work = np.add(problem.forward, problem.backward) + (problem.weight_gradient or 0.0)
    load = float(problem.microbatches * np.bincount(problem.device, work).max())
    rows = timed_rows(problem, result.timetable)
    return {
        "reason": None,
        "bubble": (result.timetable.makespan(problem) - load) / load if load else 0.0,
        "order": [[str(action) for _, action in row] for row in rows],
        "starts": [[_plain(start) for start, _ in row] for row in rows],
    }


def _reason(problem: MakespanProblem, kind: str) -> str:
    """Why a rule has no schedule."""
    if kind == "gpipe":
        return (
            f"gpipe keeps all {problem.microbatches} microbatches in flight, "
            f"the smallest limit is {min(problem.in_flight)}"
        )
    ranks = 1 + max(problem.device)
    return (
        f"{kind} with several stages on a device needs them dealt out to {ranks} devices in turn, "
        f"a multiple of {ranks} microbatches, and in-flight limits that its warm-up fits"
    )
