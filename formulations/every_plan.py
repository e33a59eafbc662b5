"""Bounds that hold for every plan that the checker accepts.

What such a plan cannot avoid: a layer's forward and backward of a microbatch are done whole by one
device, or a share of each on r devices at the same time. A stage takes the longest of its devices'
times, a sum over its layers, so that every device of kind k is busy for its own layers' times at
least. Stages may share devices, so that transfers may be absent.

The proofs are in docs/certificates.md.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from stagewright.formulations.forms import LinearProgram
from stagewright.formulations.pipeline import PipelineProblem

Floats = NDArray[np.float64]

LOAD = "least load over the device kinds"


@dataclass(frozen=True)
class Layers:
    """What every layer costs on r devices, tables of shape (K, R, L) or (R, L), r = 1 .. R.

    Layers that cannot be on r devices have inf there.
    """

    problem: PipelineProblem

    @cached_property
    def shares(self) -> range:
        """Numbers of devices that a stage may have."""
        return range(1, len(self.problem.cluster) + 1)

    @cached_property
    def forward(self) -> Floats:
        """Seconds of the forward on a device of kind k, shape (K, R, L)."""
        return self._table("forward_seconds")

    @cached_property
    def backward(self) -> Floats:
        """Seconds of the whole backward, shape (K, R, L)."""
        return self._table("backward_seconds")

    @cached_property
    def device_seconds(self) -> Floats:
        """Device-seconds per microbatch on kind k, the number of devices at its best, (K, L)."""
        counts = np.array(self.shares)[None, :, None]
        return np.asarray((counts * (self.forward + self.backward)).min(axis=1))

    def _table(self, name: str) -> Floats:
        kinds = self.problem.kinds
        return np.array([
            [getattr(self.problem.costs(kind, r), name) for r in self.shares] for kind in kinds
        ])  # fmt: skip


def device_counts(problem: PipelineProblem) -> Floats:
    """Devices of each kind, shape (K,)."""
    kinds = [device.kind for device in problem.cluster.devices]
    return np.array([kinds.count(kind) for kind in problem.kinds], dtype=float)


def load_bound(problem: PipelineProblem, prices: Floats) -> float:
    """All devices together have only so much time; ``prices`` of a second on each kind, (K,).

    In a plan of T seconds a device of kind k is busy for at most T. Layer l of a microbatch takes
    e(l, k) device-seconds at least if it is on kind k alone, and a convex combination of them in
    any case. At prices p >= 0 with sum n_k p_k = 1 all the time costs T, and a layer costs
    min_k p_k e(l, k) at least, so that T >= M sum_l min_k p_k e(l, k). Holds for any prices; the
    best are the duals of a linear program (:func:`price_program`).
    """
    counts = device_counts(problem)
    whole = float(counts @ prices)
    if not (prices >= 0).all() or not 0 < whole < math.inf:
        return 0.0
    work = prices[:, None] * Layers(problem).device_seconds
    return problem.microbatches * float(work.min(axis=0).sum()) / whole


def price_program(problem: PipelineProblem) -> LinearProgram:
    """The program for the best prices of :func:`load_bound`: columns p_k, then a layer's cost."""
    seconds = Layers(problem).device_seconds
    kinds, layers = seconds.shape
    scale = float(seconds.max(initial=0.0, where=np.isfinite(seconds))) or 1.0
    of_price = sparse.vstack([sparse.diags_array(row) for row in seconds.T / scale], format="csr")
    above = sparse.kron(sparse.eye_array(layers), np.ones((kinds, 1)))
    row = sparse.csr_array(np.append(device_counts(problem), np.zeros(layers))[None, :])
    rows = kinds * layers
    return LinearProgram(
        cost=np.append(np.zeros(kinds), -np.ones(layers)),
        matrix=sparse.csr_array(sparse.vstack([sparse.hstack([of_price, -above]), row])),
        row_lower=np.append(np.zeros(rows), 1.0),
        row_upper=np.append(np.full(rows, np.inf), 1.0),
        lower=np.zeros(kinds + layers),
        upper=np.full(kinds + layers, np.inf),
        integral=np.zeros(kinds + layers, dtype=bool),
    )
