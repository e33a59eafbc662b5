"""ZBV: zero bubble with two stages per device in a V (Qi et al. 2024, arXiv version, section 6)."""

from collections.abc import Sequence
from functools import lru_cache

from stagewright.formulations.plans.actions import Action
from stagewright.formulations.schedules.order import B, F, I, Order, Row, W
from stagewright.formulations.schedules.placements import Device, v_shape
from stagewright.formulations.schedules.published.automatic import Goal
from stagewright.formulations.schedules.published.automatic_v import automatic_v
from stagewright.formulations.schedules.published.construction import require_stages
from stagewright.formulations.schedules.timing import ActivationMemory, StageTimes, activations


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


@lru_cache(maxsize=8)
def zbv(
    devices: int,
    microbatches: int,
    times: StageTimes | None = None,
    memory: ActivationMemory | None = None,
    goal: Goal = "makespan",
) -> Order:
    """ZBV: device d has the stages d and 2 p - 1 - d; with ``times`` the order of `automatic_v`.

    At most 2 p microbatches of a stage, half a device's layers, are in flight on a device: the
    activations of 1F1B's first stage. With tF = tI = tW and m >= 2 p - 1 no device is idle from its
    first to its last computation; the makespan is 6 m + p - 1 such times. With ``times`` a limit in
    ``memory`` that allows less counts too.
    """
    if times is not None:
        device = v_shape(devices)
        require_stages(times, len(device))
        # A microbatch of a device's two stages counts as two.
        memory = (memory or activations(device, 2 * devices)).within(devices, device)
        return automatic_v(times, microbatches, memory, goal)
    return Order(tuple(_row(devices, d, microbatches) for d in range(devices)))


def _row(devices: int, d: int, microbatches: int) -> Row:
    # Planned for enough microbatches to fill the pipeline; those beyond m are left out.
    count = max(2 * devices - 1, microbatches)
    down, up, left = d, 2 * devices - 1 - d, devices - d
    f = [(s, F) for s in (down, up)]
    i = [(s, I) for s in (down, up)]
    w = [(s, W) for s in (down, up)]
    there, back = [f[0], i[0], w[0]], [f[1], i[1], w[1]]
    steps = [f[0]] * (2 * left - 1) + [f[1], f[0]] * d + back * left
    started, returned = 2 * left - 1 + d, devices
    while started < count:
        steps += there + back
        started, returned = started + 1, returned + 1
    steps += (there[1:] + back) * (count - returned)
    steps += [i[0], i[1]] * d + [i[0], w[0]] * left + [w[1]] * d + [w[0]] * d
    done = dict.fromkeys((*f, *i, *w), 0)
    row = []
    for stage, kind in steps:
        m = done[stage, kind]
        done[stage, kind] += 1
        if m < microbatches:
            row.append(Action(stage, kind, m))
    return tuple(row)
