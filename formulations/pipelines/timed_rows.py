"""The timed computations of each device in a timetable of the makespan problem."""

from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.actions import Action, along_way
from stagewright.formulations.schedules.order import B, F, I, Order, W


def timed_rows(
    problem: MakespanProblem, times: Timetable
) -> tuple[tuple[tuple[float, Action], ...], ...]:
    """Per device the (start, computation) pairs in their order.

    Of computations that start together all but the last take no time; they are in the order of
    their ends, and at one instant microbatch after microbatch, which keeps every limit in flight.
    """
    rows: list[list[tuple[float, float, Action]]] = [[] for _ in range(1 + max(problem.device))]
    kinds = [
        (F, times.forward, problem.forward),
        (I if problem.is_split else B, times.backward, problem.backward),
    ]
    if times.weight_gradient is not None and problem.weight_gradient is not None:
        kinds.append((W, times.weight_gradient, problem.weight_gradient))
    for kind, starts, seconds in kinds:
        for s, row in enumerate(starts.tolist()):
            rows[problem.device[s]] += [
                (start, start + seconds[s], Action(s, kind, m)) for m, start in enumerate(row)
            ]
    return tuple(
        tuple((start, action) for start, _, action in sorted(row, key=_place)) for row in rows
    )


def order_of_times(problem: MakespanProblem, times: Timetable) -> Order:
    """The order of the computations, without their times."""
    return Order(tuple(tuple(one for _, one in row) for row in timed_rows(problem, times)))


def _place(entry: tuple[float, float, Action]) -> tuple[float, float, int, int, int]:
    start, finish, action = entry
    phase, stage = along_way(action)
    return start, finish, action.microbatch or 0, phase, stage
