"""Scheduling problems in plain numbers: pipelines of fixed stages, and job shops."""

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from stagewright.formulations.forms.answers import OnProgress, Status, StopToken, silent
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.pipelines.windows import stage_times, timed_order, timetable_of_order
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.planned import with_channels
from stagewright.formulations.schedules.published.kinds import OPTIMAL, schedule_of
from stagewright.formulations.schedules.timing import ONE_MICROBATCH, TimedOrder
from stagewright.service.requests import SolveRequest
from stagewright.service.schedules.requests import (
    JobShopAnswer,
    JobShopRequest,
    ScheduleAnswer,
    ScheduleRequest,
)
from stagewright.service.schedules.setting import RULES, ScheduleSetting, sizes_of

if TYPE_CHECKING:
    from stagewright.service.schedules.optimal import OptimalSchedule
    from stagewright.solvers.pipelines.scheduling import ScheduleResult

LOAD = "load of the busiest device"


def schedule(
    request: ScheduleRequest,
    on_progress: OnProgress = silent,
    stop: StopToken | None = None,
    incumbent: Timetable | None = None,
) -> ScheduleAnswer:
    """The schedule of one kind, or the best that is found and proved in time.

    The search for the optimum starts from ``incumbent``, if there is one.
    """
    from stagewright.service.schedules.optimal import optimum

    began = perf_counter()
    require_scheduler(request)
    if request.kind == OPTIMAL:
        found = _optimal(request, optimum(request, request.limits(stop), on_progress, incumbent))
    else:
        found = _ordered(request)
    return _answer(request, found, perf_counter() - began, stop)


def require_scheduler(request: SolveRequest) -> None:
    """Refuse a backend that does not schedule what is asked for, before any work.

    Raises
    ------
    InputError
        If there is no such backend, or it takes neither intervals nor integers.
    """
    from stagewright.solvers.backends.backend import scheduler

    flexible = isinstance(request, JobShopRequest) and request.problem.is_flexible
    scheduler(request.limits(), choices=flexible)


def jobshop(
    request: JobShopRequest, on_progress: OnProgress = silent, stop: StopToken | None = None
) -> JobShopAnswer:
    """The shortest schedule of a job shop that is found in time."""
    from stagewright.solvers.pipelines.jobshop import solve_jobshop

    problem = request.problem
    result = solve_jobshop(problem, request.limits(stop), on_progress)
    return JobShopAnswer.of(
        result,
        makespan=result.cost,
        cost_seconds=result.cost,
        bound_seconds=result.bound,
        wall_seconds=result.seconds,
        jobs=len(problem.jobs),
        machines=len({pair[0] for steps in problem.choices for one in steps for pair in one}),
        starts=None if result.schedule is None else result.schedule.starts,
        chosen_machines=None if result.schedule is None else result.schedule.machines,
    )


@dataclass(frozen=True, slots=True)
class _TimedSchedule:
    """A schedule, with a result if its stages have one copy, and why it is not allowed, if so.

    ``bound`` is on the objective, proved by ``proved_by``.
    """

    setting: ScheduleSetting
    timed: TimedOrder | None
    result: "ScheduleResult | None"
    reason: str | None
    bound: float
    proved_by: str


def _optimal(request: ScheduleRequest, best: "OptimalSchedule") -> _TimedSchedule:
    """The optimum, or why there is none."""
    result, problem = best.result, best.setting.problem
    if result.timetable is None:
        most = f"a makespan of at most {request.makespan_limit:g}"
        reason = f"no schedule with {most} was found"
        if _is_impossible(request, result):
            reason = f"no schedule has {most}: {result.proved_by} proves {result.bound:g}"
        return _TimedSchedule(best.setting, None, result, reason, best.bound, best.proved_by)
    timed = timed_order(problem, result.timetable)
    return _TimedSchedule(best.setting, timed, result, None, best.bound, best.proved_by)


def _is_impossible(request: ScheduleRequest, result: "ScheduleResult") -> bool:
    """Whether a bound exceeds the limit on the makespan."""
    most = request.makespan_limit
    return most is not None and result.bound > most * (1 + RELATIVE_TOLERANCE)


def _ordered(request: ScheduleRequest) -> _TimedSchedule:
    """The schedule of a kind that is an order of the computations."""
    from stagewright.solvers.pipelines.scheduling import given_schedule

    setting, problem = request.setting, request.problem
    order = _order(request)
    if order is None:
        none = given_schedule(problem, None, request.kind)
        return _TimedSchedule(
            setting, None, none, _reason(problem, request.kind), none.bound, none.proved_by
        )
    reason = _in_flight_reason(request, order) or _memory_reason(request, order)
    if len(setting.paths) > 1:
        timed, _ = with_channels(order, stage_times(problem), problem.duplex == "full")
        return _TimedSchedule(setting, timed, None, reason, *_bound(request, timed, None))
    timed, timetable = timetable_of_order(problem, order)
    result = given_schedule(problem, None if reason else timetable, request.kind)
    return _TimedSchedule(setting, timed, result, reason, *_bound(request, timed, result))


def _bound(
    request: ScheduleRequest, timed: TimedOrder, result: "ScheduleResult | None"
) -> tuple[float, str]:
    """A lower bound on the objective of every schedule with these devices, and its argument."""
    setting = request.setting
    if request.objective == "memory":
        return max(max(setting.memory.least(path)) for path in setting.paths), ONE_MICROBATCH
    if result is not None:
        return result.bound, result.proved_by
    return max(timed.loads()), LOAD


def _order(request: ScheduleRequest) -> Order | None:
    from stagewright.solvers.pipelines.list_scheduling import rule_order

    for rule in RULES:
        if request.kind == rule:
            return rule_order(request.problem, rule)
    return schedule_of(request.kind, sizes_of(request, request.setting))


def _in_flight_reason(request: ScheduleRequest, order: Order) -> str | None:
    """Why the order breaks a limit on the microbatches in flight, if it does."""
    pairs = zip(order.most_in_flight(), request.problem.in_flight, strict=True)
    for s, (most, limit) in enumerate(pairs):
        if most > limit:
            return f"{request.kind} keeps {most} microbatches in flight on stage {s}, not {limit}"
    return None


def _memory_reason(request: ScheduleRequest, order: Order) -> str | None:
    """Why the order breaks a limit of a device's memory, if it does."""
    memory = request.setting.memory
    peaks = memory.peaks(order)
    for d, (peak, limit) in enumerate(zip(peaks, memory.limit, strict=True)):
        if peak > limit * (1 + RELATIVE_TOLERANCE):
            return (
                f"{request.kind} holds {peak:g} on device {d}, whose limit is {limit:g}; it fits "
                f"if the limit of all devices is at least {max(peaks):g}"
            )
    return None


def _answer(
    request: ScheduleRequest, found: _TimedSchedule, seconds: float, stop: StopToken | None
) -> ScheduleAnswer:
    setting, timed = found.setting, None if found.reason else found.timed
    figures = _figures(found)
    cost = None if timed is None else figures[request.objective]
    return ScheduleAnswer.of(
        found,
        setting,
        request,
        status=_status(request, found, cost, stop),
        planner=request.kind,
        stages=len(request.forward),
        device=setting.paths[0] if len(setting.paths) == 1 else None,
        makespan=None if timed is None else plain(figures["makespan"]),
        span=None if timed is None else plain(figures["span"]),
        peak_memory=plain(figures["memory"]),
        peak_memory_per_device=figures["peaks"],
        bound=plain(found.bound),
        # The names that every answer has; the unit is the request's.
        cost_seconds=plain(cost),
        bound_seconds=plain(found.bound),
        gap=None if cost is None else _gap(cost, found.bound),
        wall_seconds=seconds,
        **_rows(timed),
        timed=timed,
    )


def _figures(found: _TimedSchedule) -> dict[str, Any]:
    """The makespan, span and memory of a schedule, also of one that does not fit."""
    if found.timed is None:
        return {"makespan": None, "span": None, "memory": None, "peaks": None}
    peaks = found.setting.memory.peaks(found.timed.order)
    return {
        "makespan": found.timed.makespan(),
        "span": found.timed.longest_span(),
        "memory": max(peaks),
        "peaks": tuple(map(plain, peaks)),
    }


def _status(
    request: ScheduleRequest, found: _TimedSchedule, cost: float | None, stop: StopToken | None
) -> Status:
    result = found.result
    if cost is None:
        open_ = request.kind == OPTIMAL and result and not _is_impossible(request, result)
        return request.limits(stop).status(found=False) if open_ else Status.INFEASIBLE
    if cost <= found.bound * (1 + RELATIVE_TOLERANCE):
        return Status.OPTIMAL
    # The result's own bound may be met up to the rounding of its solver.
    if request.objective != "memory" and result is not None and result.bound == found.bound:
        return result.status
    return request.limits(stop).status(found=True) if request.kind == OPTIMAL else Status.FEASIBLE


def _gap(cost: float, bound: float) -> float:
    return max(0.0, (cost - bound) / cost) if cost > 0 else 0.0


def plain(value: float | None) -> float | int | None:
    """A whole number as an int, so that integers stay integers."""
    return int(value) if value is not None and float(value).is_integer() else value


def _rows(timed: TimedOrder | None) -> dict[str, Any]:
    """The idle time, and each device's actions in order with their starts.

    The bubble is the idle time of the busiest device as a fraction of its work, which with equal
    stages and no transfers is (S - 1) / M for GPipe and 1F1B (Narayanan's thesis, 4.2.2).
    """
    if timed is None:
        return {"bubble": None, "idle": None, "order": None, "starts": None}
    load = max(timed.loads())
    rows = [_written(timed, d) for d in range(len(timed.starts))]
    return {
        "bubble": (timed.makespan() - load) / load if load else 0.0,
        "idle": timed.idle(),
        "order": [[action for action, _ in row] for row in rows],
        "starts": [[plain(start) for _, start in row] for row in rows],
    }


def _written(timed: TimedOrder, device: int) -> list[tuple[str, float]]:
    """A device's actions with their starts."""
    pairs = zip(timed.order.rows[device], timed.starts[device], strict=True)
    return [(str(action), start) for action, start in pairs]


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
