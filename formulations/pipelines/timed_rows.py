"""The timed computations of each device in a timetable of the makespan problem, and back."""

import numpy as np

from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.actions import Action, along_way
from stagewright.formulations.schedules.channels import with_channels
from stagewright.formulations.schedules.order import B, F, I, Order, W
from stagewright.formulations.schedules.timing import StageTimes, TimedOrder


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


def stage_times(problem: MakespanProblem) -> StageTimes:
    """The times of the problem's stages; a whole backward is an input gradient alone."""
    return StageTimes(
        forward=problem.forward,
        input_gradient=problem.backward,
        weight_gradient=problem.weight_gradient or (0.0,) * problem.stages,
        send_forward=problem.send_forward,
        send_backward=problem.send_backward,
    )


def timed_order(problem: MakespanProblem, times: Timetable) -> TimedOrder:
    """The order of a timetable with its start times."""
    starts = tuple(tuple(start for start, _ in row) for row in timed_rows(problem, times))
    return TimedOrder(order_of_times(problem, times), stage_times(problem), starts)


def timetable_of_order(problem: MakespanProblem, order: Order) -> tuple[TimedOrder, Timetable]:
    """Earliest start times of an order of the problem's stages, as an order and as a timetable.

    If the problem's backwards are split, a whole one in the order is an input gradient and a weight
    gradient in sequence whose gradient is sent only after both.

    Raises
    ------
    InputError
        If the devices deadlock.
    """
    timed, sent = with_channels(order, stage_times(problem), problem.duplex == "full")
    shape = (problem.stages, problem.microbatches)
    starts = {kind: np.zeros(shape) for kind in (F, I, W)}
    for row, begun in zip(order.rows, timed.starts, strict=True):
        for action, start in zip(row, begun, strict=True):
            place = action.stage, action.microbatch or 0
            starts[I if action.kind is B else action.kind][place] = start
            if action.kind is B:
                starts[W][place] = start + problem.backward[action.stage]
    sends = np.zeros((2, problem.stages - 1, problem.microbatches))
    for (forward, stage, m), start in sent.items():
        sends[0 if forward else 1, stage - forward, m] = start
    last = starts[W] if problem.is_split else starts[I]
    return timed, Timetable(
        forward=starts[F],
        backward=starts[I],
        send_forward=sends[0],
        send_backward=sends[1],
        reduce=(last + np.array(problem.last_computation)[:, None]).max(axis=1),
        weight_gradient=starts[W] if problem.is_split else None,
    )


def _place(entry: tuple[float, float, Action]) -> tuple[float, float, int, int, int]:
    start, finish, action = entry
    phase, stage = along_way(action)
    return start, finish, action.microbatch or 0, phase, stage
