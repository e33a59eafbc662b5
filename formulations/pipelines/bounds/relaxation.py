"""A relaxation of pipeline planning that bounds every plan: the best link everywhere.

Every pair of devices gets the largest bandwidth and the least latency of the cluster, every layer
the time of its fastest device kind, and every device the largest memory. Let h be the time of
forward and backward of one microbatch through the stages before a stage, and x its own forward and
backward. Then the iteration takes at least h + M x, and at least the forward path to the stage plus
M x plus its all-reduce and update.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stagewright.formulations.pipelines.bounds.server_relaxation import (
    APART,
    WITHIN,
    Place,
    RelaxedStage,
    ServerRelaxation,
)
from stagewright.formulations.pipelines.bppm import earliest_starts, prefix_sums
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.memory import state_factors
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.prices.collectives import pace, paced_seconds
from stagewright.graphs.documents.arrays import Floats, Ints


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
    return float(paced_seconds(size, form.seconds_per_byte[link], form.latency[link]))


def _finish(form: ServerRelaxation, c: int, stage: RelaxedStage) -> float:
    """Seconds of the all-reduce and the optimizer's step."""
    link = WITHIN[stage.place]
    weights = form.parameters[stage.stop] - form.parameters[stage.start]
    step = form.update[c, stage.stop] - form.update[c, stage.start]
    return float(paced_seconds(weights, form.ring[link, c], form.ring_latency[link, c]) + step)


FILL_AND_DRAIN = "fill-and-drain relaxation, best link everywhere"
WIDE_FILL_AND_DRAIN = "fill-and-drain relaxation, also of devices that take turns"


class Relaxation(NamedTuple):
    """Tables of the relaxed problem; prefix sums over the first l layers have L + 1 entries.

    Attributes
    ----------
    microbatches
        M.
    samples
        Samples of a microbatch, b.
    forward, backward
        Prefix sums of seconds per microbatch on each of r devices, shape (R + 1, L + 1) by r; no
        layer can be split among more than R.
    first
        The least l' such that a stage of layers l' to l may be split among r, shape (R + 1, L + 1).
    update
        Prefix sums of seconds of the optimizer step, shape (L + 1,).
    parameters
        Prefix sums of parameter bytes, shape (L + 1,).
    boundary
        Bytes per microbatch after layer l, shape (L + 1,).
    saved
        Prefix sums of saved bytes, shape (R + 1, L + 1) by r.
    state_factor
        Bytes of weights, gradients and optimizer state per parameter byte, shape (V + 1,) by the
        number of a stage's devices.
    memory
        Bytes of the largest device memory.
    seconds_per_byte, latency
        Inverse bandwidth and latency of the best link.
    """

    microbatches: int
    samples: int
    forward: Floats
    backward: Floats
    first: Ints
    update: Floats
    parameters: Floats
    boundary: Floats
    saved: Floats
    state_factor: Floats
    memory: float
    seconds_per_byte: float
    latency: float

    def share_bytes(self, volume: Floats, shares: int) -> Floats:
        """Bytes of the largest of ``shares`` shares of a microbatch, in whole samples."""
        return volume * (-(-self.samples // shares) / self.samples)


def relax(problem: PipelineProblem) -> Relaxation:
    """The relaxation of ``problem``."""
    size = len(problem.cluster)
    most = min(size, int(problem.replicas_per_layer.max()))
    shares = [max(r, 1) for r in range(most + 1)]
    costs = [[problem.costs(kind, r) for r in shares] for kind in problem.kinds]
    bandwidth, latency = problem.cluster.pairs.best_between(np.arange(size)) or (np.inf, 0.0)
    boundary = [problem.boundary_bytes(stop) for stop in range(1, len(problem.chain))]
    return Relaxation(
        problem.microbatches,
        problem.chain.microbatch_size,
        prefix_sums(np.min([[c.forward_seconds for c in row] for row in costs], axis=0)),
        prefix_sums(np.min([[c.backward_seconds for c in row] for row in costs], axis=0)),
        earliest_starts(problem.replicas_per_layer, most),
        prefix_sums(np.min([problem.update_per_layer(kind) for kind in problem.kinds], axis=0)),
        prefix_sums(problem.chain.parameter_bytes),
        np.array([0.0, *boundary, 0.0]),
        prefix_sums(np.array([problem.saved_per_layer(r) for r in shares])),
        state_factors(problem, size),
        float(problem.memory_bytes.max()),
        pace(bandwidth),
        latency,
    )
