"""The timed computations of each device in a timetable of the makespan problem."""

from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.actions import Action, along_way
from stagewright.formulations.schedules.order import B, F, I, Order, W


def timed_rows(
    problem: MakespanProblem, times: Timetable
) -> tuple[tuple[tuple[float, Action], ...], ...]:
    """Per device the (start, computation) pairs sorted by start; forwards come first in ties."""
    rows: list[list[tuple[float, Action]]] = [[] for _ in range(1 + max(problem.device))]
    kinds = [(F, times.forward), (I if problem.is_split else B, times.backward)]
    if times.weight_gradient is not None:
        kinds.append((W, times.weight_gradient))
    for kind, starts in kinds:
        for s, row in enumerate(starts.tolist()):
            rows[problem.device[s]] += [(start, Action(s, kind, m)) for m, start in enumerate(row)]
    return tuple(tuple(sorted(row, key=_place)) for row in rows)


def order_of_times(problem: MakespanProblem, times: Timetable) -> Order:
    """The order of the computations, without their times."""
    return Order(tuple(tuple(one for _, one in row) for row in timed_rows(problem, times)))


def _place(entry: tuple[float, Action]) -> tuple[float, int, int, int]:
    start, action = entry
    phase, stage = along_way(action)
    return start, phase, action.microbatch or 0, stage
