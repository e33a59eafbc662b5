"""The best makespan or span of a pipeline's schedules for every limit of memory."""

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
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.published.kinds import KINDS, OPTIMAL
from stagewright.graphs.documents.errors import InputError
from stagewright.service.schedules.requests import (
    KindPoint,
    MemoryCurve,
    MemoryCurveRequest,
    MemoryPoint,
)
from stagewright.service.schedules.scheduling import plain, schedule
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
