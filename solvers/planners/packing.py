"""Devices for the stages of a relaxed plan: runs are packed into servers, and these into racks."""

from collections.abc import Sequence

from stagewright.formulations.pipelines.bppm import StageChoice
from stagewright.formulations.pipelines.server_relaxation import (
    APART,
    WITHIN,
    Levels,
    Place,
    RelaxedStage,
)
from stagewright.graphs.documents.arrays import Ints

SERVER, RACK = 0, 1
Free = dict[int, list[int]]  # devices of each server


def packed(level: Levels, ranks: Ints, stages: Sequence[RelaxedStage]) -> tuple[StageChoice, ...]:
    """Stages on devices: first-fit decreasing of the runs, then the stages that span servers.

    Parameters
    ----------
    ranks
        The rank of every device, shape (V,). A run takes devices as slow as its slowest stage may
        have; if they are too few, any others.
    """
    free: Free = {}
    for device in sorted(range(len(level.home)), key=lambda v: (-ranks[v], v)):
        free.setdefault(level.home[device], []).append(device)
    rack_of = dict(zip(level.home, level.rack, strict=True))
    chosen: dict[int, tuple[int, ...]] = {}
    for wide in _runs(stages, range(len(stages)), RACK):
        near = _rack(free, rack_of, _size(stages, wide))
        for run in _runs(stages, wide, SERVER):
            spans = _spans(stages, run, SERVER)
            devices = _take(near, ranks, _rank(stages, run), _size(stages, run), spans)
            devices.sort(key=lambda v: ranks[v])
            for s in sorted(run, key=lambda s: stages[s].rank):
                chosen[s] = tuple(sorted(devices[: stages[s].devices]))
                del devices[: stages[s].devices]
    return tuple(StageChoice(stage.start, stage.stop, chosen[s]) for s, stage in enumerate(stages))


def _runs(
    stages: Sequence[RelaxedStage], members: Sequence[int], level: int
) -> Sequence[Sequence[int]]:
    """Runs in one server or rack of the stages ``members``, in the order of packing.

    A stage that spans servers or racks is alone, and the last to be packed.
    """
    runs: list[list[int]] = []
    for s in members:
        place = stages[s].place
        if runs and place is not Place.TAKES_TURNS and APART[place] <= level:
            runs[-1].append(s)
        else:
            runs.append([s])
    return sorted(
        runs,
        key=lambda run: (
            _spans(stages, run, level), _rank(stages, run), -_size(stages, run), run
        ),
    )  # fmt: skip


def _size(stages: Sequence[RelaxedStage], run: Sequence[int]) -> int:
    return sum(stages[s].devices for s in run)


def _spans(stages: Sequence[RelaxedStage], run: Sequence[int], level: int) -> bool:
    place = stages[run[0]].place
    return place is Place.TAKES_TURNS or WITHIN[place] > level


def _rank(stages: Sequence[RelaxedStage], run: Sequence[int]) -> int:
    return max(stages[s].rank for s in run)


def _rack(free: Free, rack_of: dict[int, int], count: int) -> Free:
    """The servers of the fullest rack with ``count`` free devices, or all servers if none has."""
    racks: dict[int, Free] = {}
    for home, devices in free.items():
        racks.setdefault(rack_of[home], {})[home] = devices
    roomy = [one for one in racks.values() if sum(map(len, one.values())) >= count]
    return min(roomy, key=lambda one: sum(map(len, one.values())), default=free)


def _take(free: Free, ranks: Ints, rank: int, count: int, spans: bool) -> list[int]:
    """Remove ``count`` devices: of the fullest server that has as many, else of several servers.

    Slow devices up to ``rank`` come first, faster ones of the same server after them. A stage that
    spans servers anyway takes the smallest holes.
    """
    fits = {home: [v for v in devices if ranks[v] <= rank] for home, devices in free.items()}
    roomy = [home for home, devices in fits.items() if len(devices) >= count]
    if roomy and not spans:
        home = min(roomy, key=lambda home: (-ranks[fits[home][0]], len(free[home])))
        taken = fits[home][:count]
    else:
        homes = sorted(free, key=lambda home: len(fits[home]) * (1 if spans else -1))
        suitable = [v for home in homes for v in fits[home]]
        others = [v for home in homes for v in free[home] if ranks[v] > rank]
        taken = [*sorted(suitable, key=lambda v: -ranks[v]), *others[::-1]][:count]
    gone = {*taken}
    for devices in free.values():
        devices[:] = [v for v in devices if v not in gone]
    return taken
