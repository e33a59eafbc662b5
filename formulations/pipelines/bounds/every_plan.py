"""Bounds on every plan of tensor degree 1 without shards that the checker accepts, or finite ones.

A stage takes the longest of its devices' times, and a device's time is a sum over the stage's
layers: a device is busy at least for the times of all its layers. A layer of a microbatch is on r
devices at once, each with ceil(b/r) samples, or, with round-robin replication, on one device with
all samples (r = 1). Recomputation and optimizer steps within a backward only add to these times.
Transfers are left out, as stages on the same devices have none. During a backward, a device holds
the states and the saved activations of its layers.

A bound is computed from tables of the least times, all of shape (..., L); ``streams`` says whether
it holds for plans with one stream on every device, or also for those with two. The proofs are in
docs/certificates.md.
"""

import math
from typing import Literal

import numpy as np
from scipy import sparse

from stagewright.formulations.forms.models import LinearProgram
from stagewright.formulations.pipelines.bounds.least_times import MARGIN, LeastTimes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.units import format_bytes

LOAD = "load of all device kinds"
LAYER = "longest layer with its all-reduce"
COPIES = "copies of the layers that fit in memory"
PATH = "way of one microbatch"
LAYER_PATH = "longest layer and the way around it"

PRECISION = 1e-6  # relative width at which the bisection for the copies stops


def priced_load_bound(
    problem: PipelineProblem, prices: Floats, streams: Literal[1, 2] = 2
) -> float:
    """A bound from the total load, with ``prices`` of a second on each kind of device, (K,).

    In a plan of T seconds the n_k devices of kind k are busy for at most n_k T. On kind k a layer
    takes at least e(l, k) device-seconds per microbatch, or a share of that for a share of the
    microbatches, and once the optimizer step u(l, k). At prices p >= 0 with sum n_k p_k = 1 all
    device time costs T, so T >= sum_l (M min_k p_k e(l, k) + min_k p_k u(l, k)). This holds for any
    prices; the best ones are duals of a linear program (:func:`price_program`). It also holds for
    each way to count e in `LeastTimes.loads`.
    """
    times = LeastTimes(problem, streams)
    whole = float(np.bincount(times.kind_of) @ prices)
    if not (prices >= 0).all() or not 0 < whole < math.inf:
        return 0.0
    work = max(
        float(_priced(prices, times.device_seconds(load)).min(axis=0).sum()) for load in times.loads
    )
    steps = _priced(prices, times.update).min(axis=0).sum()
    return float(problem.microbatches * work + steps) / whole


def price_program(problem: PipelineProblem) -> LinearProgram:
    """The linear program of the best prices for :func:`priced_load_bound`.

    Columns are p_k, then the least costs of the layers: of M microbatches of every layer, then of
    every optimizer step.
    """
    times = LeastTimes(problem)
    work = times.device_seconds(times.occupied)
    seconds = np.hstack([problem.microbatches * work, times.update])
    scale = float(seconds.max(initial=0.0, where=np.isfinite(seconds))) or 1.0
    kinds, costs = seconds.shape
    # p_k e(l, k) - c_l >= 0; no row for a kind whose memory is too small for the layer.
    items, of_kind = np.nonzero(np.isfinite(seconds.T))
    rows = len(items)
    matrix = sparse.csr_array(
        (
            np.concatenate([seconds[of_kind, items] / scale, -np.ones(rows)]),
            (np.tile(np.arange(rows), 2), np.concatenate([of_kind, kinds + items])),
        ),
        shape=(rows, kinds + costs),
    )
    counts = np.append(np.bincount(times.kind_of), np.zeros(costs))
    free = np.full(kinds + costs, np.inf)
    return LinearProgram(
        cost=np.append(np.zeros(kinds), -np.ones(costs)),
        matrix=sparse.csr_array(sparse.vstack([matrix, counts[None, :]])),
        row_lower=np.append(np.zeros(rows), 1.0),
        row_upper=np.append(np.full(rows, np.inf), 1.0),
        lower=np.zeros(kinds + costs),
        upper=free,
        integral=np.zeros(kinds + costs, dtype=bool),
    )


def layer_bound(problem: PipelineProblem, streams: Literal[1, 2] = 2) -> float:
    """The longest time of a layer on its best devices, with its all-reduce.

    With split replication each of r devices processes all M microbatches; with round-robin
    replication one of r processes at least M / r of them. The optimizer step follows. Gradients are
    all-reduced once per iteration; in a periodic plan the all-reduce may overlap with computations
    of the next iteration and with the optimizer step of another.
    """
    times, best = LeastTimes(problem, streams), np.full(len(problem.chain), np.inf)
    for r in times.worthwhile:
        ring, step = times.all_reduce(r), times.slowest_of(r, times.update)
        for busy in _busy(times, times.occupied, r):
            best = np.minimum(best, np.maximum(busy + step, ring))
    return float(best.max())


def copies_bound(problem: PipelineProblem, streams: Literal[1, 2] = 2) -> float:
    """The least time T for which the required copies of the layers fit in the total memory.

    A device spends at most T - u on a layer, so the states of the layer are on at least
    M e / (T - u) devices. T is found by bisection; below it the copies exceed the total memory.
    Infinite if a single copy of each layer does.
    """
    times = LeastTimes(problem, streams)
    work = problem.microbatches * times.device_seconds(times.occupied).min(axis=0)
    steps = times.update.min(axis=0)
    memory = float(problem.memory_bytes.sum()) * (1 + MARGIN)

    states = times.state_bytes
    kept = states > 0
    if not np.isfinite(work).all():
        return math.inf

    def fits(limit: float) -> bool:
        if (limit < steps).any():
            return False
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            copies = np.where(work > 0, work / (limit - steps), 1.0)
        copies = np.ceil(np.maximum(1.0, copies * (1 - MARGIN)))
        return float(copies[kept] @ states[kept]) <= memory

    low, high = 0.0, float((work + steps).max())
    if not fits(high):
        return math.inf
    least = PRECISION * high
    while high > max(least, low * (1 + PRECISION)):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


def path_bound(problem: PipelineProblem, whole: bool) -> float:
    """The time of a microbatch through all forwards and backwards, each at its fastest.

    ``whole``: backwards are not split. Otherwise a stage may send the input gradient before it
    computes the weight gradient, so only one layer's weight gradient and optimizer step count.
    """
    times = LeastTimes(problem)
    back = _least(times.backward if whole else times.gradient)
    ahead = np.append(np.cumsum(back[::-1])[::-1], 0.0)[1:]  # of the layers after l
    last = ahead + _least(times.backward) + times.update.min(axis=0)
    return float(_least(times.forward).sum() + last.max())


def layer_path_bound(problem: PipelineProblem, whole: bool) -> float:
    """The path to a layer, all its work, and the path after it; ``whole`` as in `path_bound`.

    The backward path to the first layer follows the last backward (or input gradient); the
    all-reduce and the optimizer step follow all the work.
    """
    times, layers = LeastTimes(problem), len(problem.chain)
    forward, back = _least(times.forward), _least(times.backward if whole else times.gradient)
    steps = times.update.min(axis=0)
    head = np.cumsum(forward) - forward
    # The backward path through the layers before l ends with the first layer's W and update.
    first = float(_least(times.backward)[0] + steps[0])
    tail = np.where(np.arange(layers) > 0, first + np.cumsum(back) - back - back[0], 0.0)
    best = np.full(layers, np.inf)
    for r in times.worthwhile:
        ring, step = times.all_reduce(r), times.slowest_of(r, times.update)
        work = _busy(times, times.forward + times.backward, r)
        sent = _busy(times, times.forward + (times.backward if whole else times.gradient), r)
        for busy, until in zip(work, sent, strict=True):
            best = np.minimum(best, head + np.maximum(busy + ring + step, until + tail))
    return float(best.max())


def why_nothing_fits(problem: PipelineProblem) -> str | None:
    """Why no plan exists, if memory or the samples of a microbatch rule all out; else None."""
    times = LeastTimes(problem)
    for l, layer in enumerate(problem.chain.layers):
        if not times.possible[:, l].any():
            need = float(times.needs[: problem.replicas_per_layer[l], l].min())
            largest = float(problem.memory_bytes.max())
            return (
                f"layer {layer.name!r} with one microbatch needs {format_bytes(need)} on a device, "
                f"the largest has {format_bytes(largest)}: {need - largest:.0f} bytes short"
            )
    need, memory = float(times.state_bytes.sum()), float(problem.memory_bytes.sum())
    if need <= memory * (1 + MARGIN):
        return None
    return (
        f"weights, gradients and optimizer state of all layers need {format_bytes(need)}, all "
        f"devices have {format_bytes(memory)}: {need - memory:.0f} bytes short"
    )


def _least(seconds: Floats) -> Floats:
    """The least over kinds and numbers of devices, shape (L,)."""
    return np.asarray(seconds.min(axis=(0, 1)))


def _priced(prices: Floats, seconds: Floats) -> Floats:
    """The cost of ``seconds``, shape (K, L); infinite seconds cost inf even at price 0."""
    return np.where(np.isfinite(seconds), prices[:, None] * seconds, np.inf)


def _busy(times: LeastTimes, seconds: Floats, r: int) -> list[Floats]:
    """Least seconds of all microbatches on the busiest of r devices, shape (L,).

    For round-robin replication, then for split replication where that is possible.
    """
    total, alone = times.problem.microbatches, seconds[:, 0]
    alternating = -(-total // r) * times.slowest_of(1, alone)
    if total >= r:
        alternating = np.maximum(alternating, total // r * times.slowest_of(r, alone))
    if r not in times.numbers:
        return [alternating]
    return [alternating, total * times.slowest_of(r, seconds[:, r - 1])]
