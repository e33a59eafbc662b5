"""A relaxation of pipeline planning that bounds every plan: the best link, wherever it is used.

Every pair of devices is given the largest bandwidth and the least latency of the cluster, every
layer the time of its quickest device kind, and every device the largest memory. A stage that the
first microbatch reaches after time h, and whose last backward is followed by the way back, makes
the iteration last at least h + M x (h: both ways through the stages before it; x: forward and
backward of one microbatch), and at least the way there plus M x plus its all-reduce and update.
"""

from typing import NamedTuple

import numpy as np

from stagewright.formulations.pipelines.bppm import earliest_starts, prefix_sums
from stagewright.formulations.plans.memory import state_factors
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.arrays import Floats, Ints

FILL_AND_DRAIN = "fill-and-drain relaxation, best link everywhere"
WIDE_FILL_AND_DRAIN = "fill-and-drain relaxation, also of devices that take turns"


class Relaxation(NamedTuple):
    """Tables of the relaxed problem; prefixes over the first l layers have L + 1 entries.

    Attributes
    ----------
    microbatches
        M.
    samples
        b, the samples of a microbatch.
    forward, backward
        Seconds per microbatch on each of r devices, prefixes, shape (R + 1, L + 1) by r; no layer
        can be split among more than R.
    first
        The least l' such that a stage of layers l' to l may be split among r, shape (R + 1, L + 1).
    update
        Prefix of seconds of the optimizer's step, shape (L + 1,).
    parameters
        Prefix of parameter bytes, shape (L + 1,).
    boundary
        Bytes per microbatch after layer l, shape (L + 1,).
    saved
        Prefixes of saved bytes, shape (R + 1, L + 1) by r.
    state_factor
        Bytes of weights, gradients and optimizer state per parameter byte, shape (V + 1,) by the
        number of a stage's devices.
    memory
        The largest device's bytes.
    pace, delay
        Seconds per byte and latency of the best link.
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
    pace: float
    delay: float

    def share_bytes(self, volume: Floats, shares: int) -> Floats:
        """Bytes of the largest of ``shares`` shares of microbatches, in whole samples."""
        return volume * (-(-self.samples // shares) / self.samples)


def relax(problem: PipelineProblem) -> Relaxation:
    """The relaxation of ``problem``."""
    size = len(problem.cluster)
    most = min(size, int(problem.replicas_per_layer.max()))
    shares = [max(r, 1) for r in range(most + 1)]
    costs = [[problem.costs(kind, r) for r in shares] for kind in problem.kinds]
    apart = ~np.eye(size, dtype=bool)
    links, delays = problem.cluster.bandwidth[apart], problem.cluster.latency[apart]
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
        1 / float(links.max()) if len(links) else 0.0,
        float(delays.min()) if len(delays) else 0.0,
    )
