"""Devices for the stages of a relaxed plan: runs are packed into servers."""

from collections.abc import Sequence

from stagewright.formulations.pipelines.bppm import StageChoice
from stagewright.formulations.pipelines.server_relaxation import Levels, Place, RelaxedStage


def packed(
    level: Levels, speed: Sequence[float], stages: Sequence[RelaxedStage]
) -> tuple[StageChoice, ...]:
    """Stages on devices: first-fit decreasing of the runs, then the stages that span servers.

    Parameters
    ----------
    speed
        Seconds of the whole chain on each device, shape (V,): faster servers are filled first.
    """
    free: dict[int, list[int]] = {}
    for device in sorted(range(len(level.home)), key=lambda v: (speed[v], v)):
        free.setdefault(level.home[device], []).append(device)
    runs = _runs(stages)
    chosen: dict[int, tuple[int, ...]] = {}
    for run in sorted(runs, key=lambda run: (_spans(stages, run), -_size(stages, run), run)):
        devices = _take(free, _size(stages, run), _spans(stages, run))
        for s in run:
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


def _take(free: dict[int, list[int]], count: int, spans: bool) -> list[int]:
    """Remove ``count`` devices: of the fullest server that has as many, else of several servers.

    A stage that spans servers anyway takes the smallest holes.
    """
    roomy = [home for home, devices in free.items() if len(devices) >= count]
    if roomy and not spans:
        home = min(roomy, key=lambda home: len(free[home]))
        taken, free[home] = free[home][:count], free[home][count:]
        return taken
    taken = []
    for home in sorted(free, key=lambda home: len(free[home]) * (1 if spans else -1)):
        more = free[home][: count - len(taken)]
        free[home] = free[home][len(more) :]
        taken += more
    return taken
