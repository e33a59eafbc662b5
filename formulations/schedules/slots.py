"""Schedules by time slots: a forward or backward of any stage takes one slot."""

from collections.abc import Sequence

from stagewright.formulations.plans.actions import Action
from stagewright.formulations.schedules.order import B, F, Order
from stagewright.formulations.schedules.placements import Device


def in_units(paths: Sequence[Device], unit: int, microbatches: int) -> Order:
    """Microbatches start on every path two slots apart, in units of ``unit`` per path.

    Of S stages, stage s does microbatch i of a unit forward in slot s + 2 i, backward in slot
    2 S - 1 - s + 2 i. A unit starts 2 S slots after the one before it. Microbatch m takes path
    m mod the number of paths.
    """
    stages, count = len(paths[0]), len(paths)
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(1 + max(map(max, paths)))]
    for m in range(microbatches):
        path, place = paths[m % count], m // count
        first = 2 * stages * (place // unit) + 2 * (place % unit)
        for s, d in enumerate(path):
            rows[d].append((first + s, Action(s, F, m)))
            rows[d].append((first + 2 * stages - 1 - s, Action(s, B, m)))
    for row in rows:
        row.sort(key=lambda entry: entry[0])
    actions = tuple(tuple(action for _, action in row) for row in rows)
    return Order(actions, tuple(m % count for m in range(microbatches)))
