"""The schedule of a relaxed plan: at most the makespan of every plan that it stands for."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.pipelines.server_relaxation import (
    APART,
    WITHIN,
    RelaxedStage,
    ServerRelaxation,
)


def choice_of(form: ServerRelaxation, stage: RelaxedStage) -> int:
    """The index of the choice of a split stage."""
    split = slice(form.turns)
    same = (form.devices[split] == stage.devices) & (form.rank[split] == stage.rank)
    return int(np.flatnonzero(same)[0])


def relaxed_schedule(form: ServerRelaxation, stages: Sequence[RelaxedStage]) -> MakespanProblem:
    """The makespan problem with the relaxation's times and limits in flight, for split stages."""
    choices = [choice_of(form, stage) for stage in stages]
    sends = [
        _send(form, form.pieces[c] * form.pieces[d], two)
        for (c, d), (_, two) in zip(pairwise(choices), pairwise(stages), strict=True)
    ]
    pairs = list(zip(choices, stages, strict=True))
    return MakespanProblem(
        form.microbatches,
        tuple(float(form.forward[c, one.stop] - form.forward[c, one.start]) for c, one in pairs),
        tuple(float(form.backward[c, one.stop] - form.backward[c, one.start]) for c, one in pairs),
        tuple(sends),
        tuple(sends),
        tuple(_finish(form, c, one) for c, one in pairs),
        tuple(int(form.limit[c, one.start, one.stop]) for c, one in pairs),
    )


def _send(form: ServerRelaxation, pieces: int, stage: RelaxedStage) -> float:
    """Seconds of a transfer to ``stage``."""
    link = APART[stage.place]
    size = form.boundary[stage.start] * form.share[min(form.samples, pieces)]
    return float(size * form.seconds_per_byte[link] + form.latency[link])


def _finish(form: ServerRelaxation, c: int, stage: RelaxedStage) -> float:
    """Seconds of the all-reduce and the optimizer's step."""
    link = WITHIN[stage.place]
    weights = form.parameters[stage.stop] - form.parameters[stage.start]
    step = form.update[c, stage.stop] - form.update[c, stage.start]
    return float(form.ring[link, c] * weights + form.ring_latency[link, c] + step)
