"""Ends of an order's computations from the definition: the least fixed point of all waits."""

from collections.abc import Sequence

from stagewright.formulations.plans.actions import Action
from stagewright.formulations.schedules.order import F, Order, W
from stagewright.formulations.schedules.timing import StageTimes

Blocks = Sequence[Sequence[Action]]


def ends_by_relaxation(
    order: Order, times: StageTimes, rows: Sequence[Blocks] | None = None
) -> list[list[float]]:
    """Per device the end of every block, by repeating all rows until nothing changes.

    Computations in one block start and end together; by default every one is its own block.
    """
    rows = rows or [[[action] for action in row] for row in order.rows]
    made: dict[tuple[str, int, int], float] = {}
    before: dict[tuple[str, int, int], float] | None = None
    ends: list[list[float]] = []
    while made != before:
        before, ends = dict(made), []
        for row in rows:
            now, at = 0.0, []
            for block in row:
                waits = [_arrival(order, times, made, action) for action in block]
                now = max([now, *waits]) + sum(times.of(action) for action in block)
                at.append(now)
                for action in block:
                    if action.kind is not W:
                        made[_key(action)] = now
            ends.append(at)
    return ends


def _key(action: Action) -> tuple[str, int, int]:
    return "F" if action.kind is F else "B", action.stage, action.microbatch or 0


def _arrival(
    order: Order, times: StageTimes, made: dict[tuple[str, int, int], float], action: Action
) -> float:
    s, m = action.stage, action.microbatch or 0
    path = order.paths[order.path_of[m]]
    if action.kind is W or (action.kind is F and s == 0):
        return 0.0
    if action.kind is F:
        sent = times.send_forward[s - 1] if path[s - 1] != path[s] else 0.0
        return made.get(("F", s - 1, m), 0.0) + sent
    if s == len(path) - 1:
        return made.get(("F", s, m), 0.0)
    sent = times.send_backward[s] if path[s + 1] != path[s] else 0.0
    return made.get(("B", s + 1, m), 0.0) + sent
