"""The stage with the most missing memory in the best partition, if no periodic plan fits."""

from collections.abc import Sequence
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.patterns.pattern_problems import static_bytes
from stagewright.formulations.plans.memory import kept_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.solvers.planners.periodic.device_groups import Groups, named_group

Stages = tuple[Stage, ...]


def contiguous_shortage(
    problem: PipelineProblem, groups: Groups, modes: Sequence[Literal["none", "full"]]
) -> tuple[float, Stages, int]:
    """The contiguous partition with the least missing memory: bytes, stages, index of the stage.

    With one microbatch in flight; negative bytes are free memory.
    """
    layers = len(problem.chain)
    names = [named_group(problem, group) for group in groups]
    need = np.full((layers, layers + 1), np.inf)
    for start, stop in combinations(range(layers + 1), 2):
        need[start, stop] = min(
            _needed(problem, one) for one in _modes((start, stop), names[0], modes)
        )
    # best[l]: the least shortage of the first l layers on the groups so far.
    best = np.append(-np.inf, np.full(layers, np.inf))
    cuts: list[NDArray[np.int64]] = []
    rooms = [float(problem.memory_bytes[list(group)].min()) for group in groups]
    for room in rooms:
        worst = np.maximum(best[:layers, None], need - room)
        cuts.append(np.where(worst.min(axis=0) < best, worst.argmin(axis=0), -1))
        best = np.minimum(best, worst.min(axis=0))
    found: list[tuple[float, Stage]] = []
    stop = layers
    for group, room, cut in zip(names[::-1], rooms[::-1], cuts[::-1], strict=True):
        start = int(cut[stop])
        if start >= 0:
            found.append((need[start, stop] - room, Stage((start, stop), group)))
            stop = start
    found.reverse()
    short = [bytes_ for bytes_, _ in found]
    return float(best[layers]), tuple(stage for _, stage in found), short.index(max(short))


def _modes(
    layers: tuple[int, int], names: tuple[str, ...], modes: Sequence[Literal["none", "full"]]
) -> list[Stage]:
    return [Stage(layers, names, recompute=mode) for mode in modes]


def _needed(problem: PipelineProblem, stage: Stage) -> float:
    kept = kept_bytes(problem, stage)
    return static_bytes(problem, stage) + kept.saved_bytes + kept.working_bytes
