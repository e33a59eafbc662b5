"""All published schedules of a pipeline side by side, with the optimum."""

from time import perf_counter

from stagewright.formulations.forms.answers import OnProgress, StopToken, silent
from stagewright.formulations.pipelines.makespan import Timetable
from stagewright.formulations.schedules.placements import Device
from stagewright.formulations.schedules.published.kinds import OPTIMAL
from stagewright.graphs.documents.errors import InputError
from stagewright.service.schedules.requests import (
    ComparedSchedule,
    CompareSchedulesRequest,
    RefusedSchedule,
    ScheduleAnswer,
    ScheduleComparison,
    ScheduleRequest,
)
from stagewright.service.schedules.scheduling import require_scheduler, schedule
from stagewright.service.schedules.setting import SCHEDULES


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
