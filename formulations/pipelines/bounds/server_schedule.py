"""The schedule of a relaxed plan: at most the makespan of every plan that it stands for."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from stagewright.formulations.pipelines.bounds.server_relaxation import (
    APART,
    WITHIN,
    Place,
    RelaxedStage,
    ServerRelaxation,
)
from stagewright.formulations.pipelines.makespan import MakespanProblem


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


def nearest(form: ServerRelaxation, stages: Sequence[RelaxedStage]) -> tuple[RelaxedStage, ...]:
    """The split stages at places no farther apart than any that may be possible for them."""
    within = [least_level(form, stage.devices) for stage in stages]
    apart = [len(form.rooms)]
    for one, two in pairwise(stages):
        level = least_level(form, one.devices + two.devices)
        apart.append(max(level, int(not form.together[one.rank, two.rank])))
    places = [
        Place(list(zip(WITHIN, APART, strict=True)).index((own, max(own, link))))
        for own, link in zip(within, apart, strict=True)
    ]
    return tuple(replace(one, place=place) for one, place in zip(stages, places, strict=True))


def least_level(form: ServerRelaxation, devices: int) -> int:
    """0 if so many devices may be in one server, 1 if in one rack, otherwise 2."""
    return next((level for level, room in enumerate(form.rooms) if devices <= room), 2)


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
