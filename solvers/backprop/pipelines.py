"""Cross-layer model and pipeline parallelism: devices and groups of layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.formulations.backprop.bounds import window_bounds
from stagewright.formulations.backprop.problem import Timetable
from stagewright.formulations.backprop.training import Layers, training
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.backprop.exact import best_list_schedule


@dataclass(frozen=True, slots=True, eq=False)
class Grouping:
    """The best size of groups with its timetable.

    ``bound`` holds for modulo allocation with any equal group size, in every order.
    ``seconds[g - 1]`` is the window with groups of g layers, infinite if it does not fit in memory.
    """

    group: int
    device: tuple[int, ...]
    timetable: Timetable
    bound: float
    seconds: tuple[float, ...]


def modulo_devices(layers: int, devices: int, group: int = 1) -> tuple[int, ...]:
    """Modulo allocation: groups of consecutive layers go around the devices (section 5.2.1)."""
    if not 1 <= group <= layers:
        raise InputError(f"group must be from 1 to {layers}, the number of layers, got {group}")
    return tuple(i // group % devices for i in range(layers))


def consecutive_devices(layers: int, devices: int) -> tuple[int, ...]:
    """The conventional allocation: consecutive layers, as even as possible."""
    return tuple(i * devices // layers for i in range(layers))


def group_by_ratio(layers: Layers, send: Sequence[float]) -> int:
    """Layers per group so that a transfer takes no longer than the forward of a group.

    Section 8.4.1's choice: groups of 1 for ratios of 0.05 and 0.16, of 2 for 1.8.
    """
    computed = sum(layers.forward) / layers.count
    sent = sum(send) / max(1, len(send))
    return min(layers.count, max(1, math.ceil(sent / computed))) if computed > 0 else 1


def best_grouping(
    layers: Layers,
    devices: int,
    microbatches: int = 1,
    send: Sequence[float] = (),
    sync: Sequence[float] = (),
    memory: Sequence[float] = (),
) -> Grouping:
    """List schedules of every group size from 1 to L / devices, rounded up.

    Raises
    ------
    InputError
        If no schedule fits in memory.
    """
    found: list[tuple[float, int, Timetable]] = []
    bounds, seconds = [], []
    for group in range(1, math.ceil(layers.count / devices) + 1):
        device = modulo_devices(layers.count, devices, group)
        problem = training(layers, device, microbatches, send, sync, memory=memory)
        bounds.append(max(bound for _, bound in window_bounds(problem)))
        _, timetable = best_list_schedule(problem)
        seconds.append(math.inf if timetable is None else timetable.end)
        if timetable is not None:
            found.append((timetable.end, group, timetable))
    if not found:
        raise InputError("no group size fits in memory")
    _, group, timetable = min(found, key=lambda entry: entry[:2])
    device = modulo_devices(layers.count, devices, group)
    return Grouping(group, device, timetable, min(bounds), tuple(seconds))
