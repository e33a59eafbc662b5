"""The optimal schedule of a request: on given devices, on the best ones, or with least memory."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress
from stagewright.formulations.pipelines.bounds.stages import quick_bound
from stagewright.formulations.pipelines.makespan import Timetable
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.formulations.schedules.order import Device
from stagewright.formulations.schedules.published.kinds import OPTIMAL
from stagewright.formulations.schedules.timing import ONE_MICROBATCH
from stagewright.graphs.documents.errors import InputError
from stagewright.service.schedules.requests import ScheduleRequest
from stagewright.service.schedules.setting import (
    ANY,
    FREE,
    ScheduleSetting,
    named_placements,
    on_devices,
)
from stagewright.solvers.pipelines.least_memory import least_memory
from stagewright.solvers.pipelines.placing import (
    few_placements,
    placement_bound,
    search_placement,
)
from stagewright.solvers.pipelines.scheduling import ScheduleResult, given_schedule, solve_schedule

FIRST = 0.3  # share of the time for a first look at all named placements
_PLACING = 0.5  # share of the time for the search of a free placement
ALL_PLACEMENTS = "bounds on each placement"


@dataclass(frozen=True, slots=True, eq=False)
class OptimalSchedule:
    """A schedule with the devices of ``setting``; ``bound`` is of all schedules it was chosen from.

    ``bound`` is in units of the objective, which is memory if ``limit`` is not None: the limit of
    all devices that the schedule keeps to.
    """

    setting: ScheduleSetting
    result: ScheduleResult
    bound: float
    proved_by: str
    limit: float | None = None


def optimum(
    request: ScheduleRequest, limits: Limits, on_progress: OnProgress, incumbent: Timetable | None
) -> OptimalSchedule:
    """The best schedule of a request of kind ``optimal`` that is found in time, with its bound."""
    if request.placement == ANY:
        return _best_named(request, limits, on_progress)
    if request.placement == FREE:
        return _placed_freely(request, limits, on_progress)
    return _on(request, request.setting, limits, on_progress, incumbent)


def _on(
    request: ScheduleRequest,
    setting: ScheduleSetting,
    limits: Limits,
    on_progress: OnProgress,
    incumbent: Timetable | None = None,
) -> OptimalSchedule:
    """The optimum with the devices of ``setting``."""
    if request.objective == "memory":
        return _least_memory(request, setting, limits, on_progress)
    result = solve_schedule(setting.problem, OPTIMAL, limits, on_progress, incumbent)
    return OptimalSchedule(setting, result, result.bound, result.proved_by)


def _least_memory(
    request: ScheduleRequest, setting: ScheduleSetting, limits: Limits, on_progress: OnProgress
) -> OptimalSchedule:
    """The least memory of the schedules within the limit on the makespan, if there is one."""
    problem = setting.stored_problem()
    if request.makespan_limit is None:
        least = max(setting.memory.least(setting.paths[0]))
        limited = replace(problem, memory=tuple(min(least, own) for own in problem.memory))
        result = solve_schedule(limited, OPTIMAL, limits, on_progress)
        return OptimalSchedule(setting, result, least, ONE_MICROBATCH, least)
    found = least_memory(problem, request.makespan_limit, limits, on_progress)
    result = given_schedule(problem, found.timetable, OPTIMAL)
    return OptimalSchedule(setting, result, found.bound, found.proved_by, found.limit)


def _best_named(
    request: ScheduleRequest, limits: Limits, on_progress: OnProgress
) -> OptimalSchedule:
    """The best schedule of all named placements; its bound is the least of their bounds."""
    return _best_of(
        {name: request.with_placement(name).setting for name in named_placements(request)},
        request, limits, on_progress,
    )  # fmt: skip


def _best_of(
    settings: Mapping[str, ScheduleSetting],
    request: ScheduleRequest,
    limits: Limits,
    on_progress: OnProgress,
) -> OptimalSchedule:
    """The best schedule of all settings; its bound is the least of their bounds."""
    began = perf_counter()
    found: dict[str, OptimalSchedule] = {}

    def solve(name: str, seconds: float) -> None:
        known = found[name].result.timetable if name in found else None
        share = replace(limits, seconds=seconds)
        better = _on(request, settings[name], share, lambda step: None, known)
        if name in found:
            better = _merged(found[name], better)
        found[name] = better
        best = _least(found)
        if len(found) == len(settings):
            on_progress(Progress(perf_counter() - began, _cost(best), _bound(found).bound))

    for name in settings:
        solve(name, FIRST * limits.seconds / len(settings))
    tried: set[str] = set()
    while limits.left(perf_counter() - began) > 0:
        best = _cost(_least(found))
        hopeful = [name for name in settings if name not in tried and _hopeful(found[name], best)]
        if not hopeful:
            break
        name = min(hopeful, key=lambda name: found[name].bound)
        tried.add(name)
        solve(name, limits.left(perf_counter() - began) / len(hopeful))
    weakest = _bound(found)
    return replace(_least(found), bound=weakest.bound, proved_by=weakest.proved_by)


def _hopeful(one: OptimalSchedule, best: float) -> bool:
    """Whether the placement can have a better schedule, by its bound."""
    return one.bound < best * (1 - RELATIVE_TOLERANCE)


def _merged(one: OptimalSchedule, other: OptimalSchedule) -> OptimalSchedule:
    """The better schedule and the better bound of two answers for the same devices."""
    best = min((one, other), key=_cost)
    proof = max((one, other), key=lambda each: each.bound)
    return replace(best, bound=proof.bound, proved_by=proof.proved_by)


def _least(found: dict[str, OptimalSchedule]) -> OptimalSchedule:
    return min(found.values(), key=_cost)


def _bound(found: dict[str, OptimalSchedule]) -> OptimalSchedule:
    return min(found.values(), key=lambda each: each.bound)


def _cost(one: OptimalSchedule) -> float:
    """The objective of a schedule; infinite without a schedule."""
    if one.result.cost is None:
        return float("inf")
    return one.result.cost if one.limit is None else one.limit


def _placed_freely(
    request: ScheduleRequest, limits: Limits, on_progress: OnProgress
) -> OptimalSchedule:
    """The best schedule on a placement that is searched for, with a bound on all placements.

    Where there are few, each that its bounds do not exclude is solved.
    """
    began = perf_counter()
    named = [*named_placements(request).values()]
    problem = on_devices(request, named[0]).problem
    devices = 1 + max(named[0])
    proof = placement_bound(problem, devices, limits)
    share = replace(limits, seconds=_PLACING * limits.seconds)
    best = search_placement(
        lambda device: on_devices(request, device).problem, named, proof.seconds, share
    )
    few = few_placements(len(named[0]), devices)

    def left(share: float = 1.0) -> Limits:
        return replace(limits, seconds=share * limits.left(perf_counter() - began))

    def note(step: Progress) -> None:
        seconds = perf_counter() - began
        on_progress(Progress(seconds, step.objective, max(proof.seconds, step.bound)))

    def note_one(step: Progress) -> None:
        note(replace(step, bound=proof.seconds))

    found = _on(request, on_devices(request, best), left(FIRST if few else 1.0), note_one)
    answer = replace(found, bound=proof.seconds, proved_by=proof.proved_by)
    if few and _hopeful(answer, _cost(found)):
        hopeful = _better_than(_cost(found), request, few)
        every = _best_of(hopeful, request, left(), note) if hopeful else found
        answer = min((found, every), key=_cost)
        proved = max(every.bound, proof.seconds) if hopeful else _cost(found)
        answer = replace(answer, bound=proved, proved_by=ALL_PLACEMENTS)
    return replace(answer, bound=min(answer.bound, _cost(answer)))


def _better_than(
    cost: float, request: ScheduleRequest, placements: Iterable[Device]
) -> dict[str, ScheduleSetting]:
    """The settings of the placements that may have a schedule below ``cost``."""
    found = {}
    for device in placements:
        try:
            setting = on_devices(request, device)
        except InputError:  # no room in memory
            continue
        if quick_bound(setting.problem) < cost * (1 - RELATIVE_TOLERANCE):
            found[str(device)] = setting
    return found
