"""Devices for the stages of a relaxed plan: runs are packed into servers."""

from collections.abc import Sequence

from stagewright.formulations.pipelines.bppm import StageChoice
from stagewright.formulations.pipelines.server_relaxation import Levels, Place, RelaxedStage
from stagewright.graphs.documents.arrays import Ints


def packed(level: Levels, ranks: Ints, stages: Sequence[RelaxedStage]) -> tuple[StageChoice, ...]:
    """Stages on devices: first-fit decreasing of the runs, then the stages that span servers.

    Parameters
    ----------
    ranks
        The rank of every device, shape (V,). A run takes devices as slow as its slowest stage may
        have; if they are too few, any others.
    """
    free: dict[int, list[int]] = {}
    for device in sorted(range(len(level.home)), key=lambda v: (-ranks[v], v)):
        free.setdefault(level.home[device], []).append(device)
    runs = [(_rank(stages, run), run) for run in _runs(stages)]
    chosen: dict[int, tuple[int, ...]] = {}
    for rank, run in sorted(
        runs, key=lambda one: (_spans(stages, one[1]), one[0], -_size(stages, one[1]), one[1])
    ):
        devices = _take(free, ranks, rank, _size(stages, run), _spans(stages, run))
        devices.sort(key=lambda v: ranks[v])
        for s in sorted(run, key=lambda s: stages[s].rank):
            chosen[s] = tuple(sorted(devices[: stages[s].devices]))
            del devices[: stages[s].devices]
    return tuple(StageChoice(stage.start, stage.stop, chosen[s]) for s, stage in enumerate(stages))


def _runs(stages: Sequence[RelaxedStage]) -> list[list[int]]:
    """The stages of every run; a stage that spans servers is alone."""
    runs = [[0]]
    for s in range(1, len(stages)):
        if stages[s].place is Place.SAME:
            runs[-1].append(s)
        else:
            runs.append([s])
    return runs


def _size(stages: Sequence[RelaxedStage], run: Sequence[int]) -> int:
    return sum(stages[s].devices for s in run)


def _spans(stages: Sequence[RelaxedStage], run: Sequence[int]) -> bool:
    return stages[run[0]].place is Place.SPANS


def _rank(stages: Sequence[RelaxedStage], run: Sequence[int]) -> int:
    return max(stages[s].rank for s in run)


def _take(free: dict[int, list[int]], ranks: Ints, rank: int, count: int, spans: bool) -> list[int]:
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
    for devices in free.values():
        devices[:] = [v for v in devices if v not in taken]
    return taken
