"""All published schedules of a pipeline beside the optimum, and the best for every memory limit."""

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from stagewright.formulations.forms.answers import (
    Limits,
    OnProgress,
    Progress,
    Status,
    StopToken,
    silent,
)
from stagewright.formulations.pipelines.makespan import Timetable
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.formulations.schedules.order import Device, Order
from stagewright.formulations.schedules.published.kinds import KINDS, OPTIMAL
from stagewright.graphs.documents.errors import InputError
from stagewright.service.schedules.requests import (
    ComparedSchedule,
    CompareSchedulesRequest,
    KindPoint,
    MemoryCurve,
    MemoryCurveRequest,
    MemoryPoint,
    RefusedSchedule,
    ScheduleAnswer,
    ScheduleComparison,
    ScheduleRequest,
)
from stagewright.service.schedules.scheduling import plain, require_scheduler, schedule
from stagewright.service.schedules.setting import SCHEDULES, ScheduleSetting
from stagewright.solvers.pipelines.least_memory import CurvePoint, memory_curve, memory_levels

MOST_POINTS = 40


def schedule_curve(
    request: MemoryCurveRequest, on_progress: OnProgress = silent, stop: StopToken | None = None
) -> MemoryCurve:
    """A schedule and a bound for every limit of memory, and the published kinds beside them."""
    began = perf_counter()
    setting = request.within(()).setting
    problem = setting.stored_problem()
    limits = request.limits(stop)

    def note(points: Sequence[CurvePoint]) -> None:
        worst = max(points, key=lambda point: point.gap)
        on_progress(Progress(perf_counter() - began, worst.cost, worst.bound))

    memories = request.memory or _usual_limits(setting)
    points = memory_curve(problem, memories, limits, note)
    if not request.memory:
        points = _without_tail(points)
    shown = tuple(_point(setting, point, limits) for point in points)
    proved = all(point.status == Status.OPTIMAL for point in shown)
    return MemoryCurve.of(
        setting,
        request,
        status=Status.OPTIMAL if proved else limits.status(found=True),
        stages=len(request.forward),
        device=setting.paths[0],
        wall_seconds=perf_counter() - began,
        points=shown,
        kinds=tuple(_kinds(request, setting)),
        timetables=tuple(point.timetable for point in points),
    )


def _usual_limits(setting: ScheduleSetting) -> list[float]:
    """Up to ``MOST_POINTS`` limits from the least to two microbatches of a device per device."""
    levels = memory_levels(setting.stored_problem()).limits
    most = 2 * setting.devices * max(setting.memory.least(setting.paths[0]))
    levels = levels[levels <= most * (1 + RELATIVE_TOLERANCE)]
    chosen = np.linspace(0, len(levels) - 1, min(MOST_POINTS, len(levels))).round().astype(int)
    return [float(level) for level in levels[chosen]]


def _without_tail(points: list[CurvePoint]) -> list[CurvePoint]:
    """The points up to the first from which more memory is proved not to help."""
    kept = list(points)
    while len(kept) > 1 and kept[-2].cost <= points[-1].bound * (1 + RELATIVE_TOLERANCE):
        kept.pop()
    return kept


def _point(setting: ScheduleSetting, point: CurvePoint, limits: Limits) -> MemoryPoint:
    problem = setting.problem
    return MemoryPoint.of(
        point,
        memory=plain(point.memory),
        status=Status.OPTIMAL if point.gap == 0 else limits.status(found=True),
        makespan=plain(point.timetable.makespan(problem)),
        span=plain(point.timetable.span(problem)),
        bound=plain(point.bound),
    )


def _kinds(request: MemoryCurveRequest, setting: ScheduleSetting) -> list[KindPoint]:
    """The published kinds that have the same devices, each order once."""
    found: dict[Order, KindPoint] = {}
    for kind in SCHEDULES:
        if kind == OPTIMAL:
            continue
        try:
            own = {} if kind not in KINDS else {"placement": None, "chunks": setting.chunks}
            answer = schedule(request.within((), kind=kind, **own))
        except InputError:
            continue  # not of these sizes
        if answer.timed is not None and answer.device == setting.paths[0]:
            found.setdefault(answer.timed.order, KindPoint.of(answer, kind=kind))
    return list(found.values())


def compare_schedules(
    request: CompareSchedulesRequest,
    on_progress: OnProgress = silent,
    stop: StopToken | None = None,
) -> ScheduleComparison:
    """Every kind that fits, and the optimum for each placement of those; the best come first.

    The placements share the time limit. Their searches start from the best of the kinds.
    """
    require_scheduler(request)
    began = perf_counter()
    kept: list[ScheduleAnswer] = []
    refused: list[RefusedSchedule] = []
    for kind in SCHEDULES:
        if kind != OPTIMAL:
            _try(request, kind, kept, refused)
    if kept:
        _add_optima(request, kept, refused, on_progress, stop)
    groups = _by_order(kept)
    key = {"makespan": "makespan", "span": "span", "memory": "peak_memory"}[request.objective]
    groups.sort(key=lambda group: (getattr(group[0], key), group[0].kind != OPTIMAL))
    return ScheduleComparison.of(
        request,
        stages=len(request.forward),
        wall_seconds=perf_counter() - began,
        schedules=tuple(_compared(group) for group in groups),
        refused=tuple(refused),
        answers=tuple(first for first, *_ in groups),
    )


def _try(
    request: CompareSchedulesRequest,
    kind: str,
    kept: list[ScheduleAnswer],
    refused: list[RefusedSchedule],
) -> None:
    """Add the schedule of a kind, or why there is none."""
    try:
        answer = schedule(request.of_kind(kind))
    except InputError as error:
        refused.append(RefusedSchedule(kind=kind, reason=str(error)))
        return
    if answer.makespan is None:
        refused.append(RefusedSchedule(kind=kind, reason=answer.reason or answer.status))
    else:
        kept.append(answer)


def _add_optima(
    request: CompareSchedulesRequest,
    kept: list[ScheduleAnswer],
    refused: list[RefusedSchedule],
    on_progress: OnProgress,
    stop: StopToken | None,
) -> None:
    """Add the optimum for every placement with one copy of each stage."""
    best: dict[Device, tuple[float, ScheduleAnswer, Timetable]] = {}
    for answer in kept:
        found = answer.result
        if found is not None and found.timetable is not None and found.cost is not None:
            device = answer.problem.device
            if device not in best or found.cost < best[device][0]:
                best[device] = found.cost, answer, found.timetable
    for _, answer, timetable in best.values():
        try:
            asked = _optimum_of(request, answer)
        except InputError as error:
            refused.append(RefusedSchedule(kind=OPTIMAL, reason=str(error)))
            return
        share = asked.model_copy(update={"time_limit": request.time_limit / len(best)})
        kept.append(schedule(share, on_progress, stop, timetable))


def _optimum_of(request: CompareSchedulesRequest, answer: ScheduleAnswer) -> ScheduleRequest:
    """The request for the optimum with the devices of ``answer``."""
    if request.device:
        return request.of_kind(OPTIMAL)
    placement = "line" if answer.placement == "replicated line" else answer.placement
    return request.of_kind(OPTIMAL, placement, answer.chunks)


def _by_order(answers: list[ScheduleAnswer]) -> list[list[ScheduleAnswer]]:
    """The answers in groups of the same order; an optimum stays alone."""
    groups: list[list[ScheduleAnswer]] = []
    for answer in answers:
        assert answer.timed is not None
        same = (
            group
            for group in groups
            if OPTIMAL not in (answer.kind, group[0].kind)
            and group[0].timed is not None
            and group[0].timed.order == answer.timed.order
        )
        found = next(same, None)
        if found is None:
            groups.append([answer])
        else:
            found.append(answer)
    return groups


def _compared(group: list[ScheduleAnswer]) -> ComparedSchedule:
    return ComparedSchedule.of(group[0], same_as_kinds=tuple(other.kind for other in group[1:]))
