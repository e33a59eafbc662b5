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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from stagewright.formulations.forms.models import LinearProgram
from stagewright.formulations.plans.memory import least_state_factor
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.prices.collectives import ring_seconds
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.units import format_bytes
from stagewright.graphs.machines.canonical import reordered

MARGIN = 1e-9  # relative; rounding of sums of bytes
PRECISION = 1e-6  # relative width at which the bisection for the copies stops


@dataclass(frozen=True)
class LeastTimes:
    """The least times of each layer over all devices and numbers of devices.

    Axes are kinds of devices K, numbers of devices R = 1 .. most, devices V, and layers L; entries
    are inf if memory or the number of samples rules the combination out.
    """

    problem: PipelineProblem
    streams: Literal[1, 2] = 1

    @cached_property
    def numbers(self) -> range:
        """Numbers of devices that a stage can split its microbatches among."""
        most = int(self.problem.replicas_per_layer.max())
        return range(1, min(len(self.problem.cluster), most) + 1)

    @property
    def worthwhile(self) -> range:
        """Numbers of devices that can be the best for a layer.

        From M + 1 on, a device with one microbatch computes no less, and all-reduces take longer.
        """
        most = max(self.numbers[-1], self.problem.microbatches + 1)
        return range(1, min(len(self.problem.cluster), most) + 1)

    @cached_property
    def kind_of(self) -> NDArray[np.int64]:
        """The index of each device's kind, shape (V,)."""
        kinds = self.problem.kinds
        return np.array([kinds.index(one.kind) for one in self.problem.cluster.devices])

    @cached_property
    def state_bytes(self) -> Floats:
        """The least bytes of weights, gradients and optimizer state, shape (L,)."""
        return self.problem.chain.parameter_bytes * least_state_factor(self.problem)

    @cached_property
    def needs(self) -> Floats:
        """Bytes that a layer needs on a device during its backward, shape (R, L)."""
        saved = [self.problem.saved_per_layer(r) for r in self.numbers]
        return np.asarray(saved) + self.state_bytes

    @cached_property
    def possible(self) -> NDArray[np.bool_]:
        """Whether r devices can split a layer, by its samples and their memory, shape (R, L)."""
        numbers, memory = np.array(self.numbers)[:, None], np.sort(self.problem.memory_bytes)
        with_room = len(memory) - np.searchsorted(memory * (1 + MARGIN), self.needs)
        return np.asarray((with_room >= numbers) & (numbers <= self.problem.replicas_per_layer))

    @cached_property
    def forward(self) -> Floats:
        """Seconds of a layer's forward on a device of kind k, one of r, shape (K, R, L)."""
        return self._table(lambda kind, r: self.problem.costs(kind, r).forward_seconds)

    @cached_property
    def backward(self) -> Floats:
        """Seconds of the backward, whole or its two parts, shape (K, R, L)."""
        return self._table(lambda kind, r: self.problem.least_backward(kind, r)[1])

    @cached_property
    def gradient(self) -> Floats:
        """Seconds until the input gradient can be sent, shape (K, R, L).

        The whole backward if the layer has no separate times for its parts.
        """
        return self._table(lambda kind, r: self.problem.least_backward(kind, r)[0])

    def backwards(self, whole: bool) -> tuple[Floats, Floats]:
        """`gradient` and `backward` of any backwards, or of ``whole`` ones only."""
        if not whole:
            return self.gradient, self.backward
        only = self._table(lambda kind, r: self.problem.costs(kind, r).backward_seconds)
        return only, only

    @cached_property
    def update(self) -> Floats:
        """Seconds of the optimizer's step on a layer, shape (K, L)."""
        return np.array([self.problem.update_per_layer(kind) for kind in self.problem.kinds])

    @cached_property
    def loads(self) -> tuple[Floats, ...]:
        """Device seconds of a microbatch by each of several ways of counting, (K, R, L) each.

        In none of them a device can do more than T in T seconds. With one stream its computations
        follow each other. With two, weight gradients may run beside: what must be in the main
        stream counts, or everything by the share of the device that it occupies.
        """
        if self.streams == 1 or not self.problem.knows_shares:
            return (self.forward + self.backward,)
        return self.forward + self.gradient, self.area

    @cached_property
    def occupied(self) -> Floats:
        """The largest of the loads: seconds of a device for a microbatch, shape (K, R, L)."""
        return np.asarray(np.max(self.loads, axis=0))

    @cached_property
    def area(self) -> Floats:
        """Seconds of every computation times the share of the device that it occupies."""

        def of(kind: str, r: int) -> Floats:
            forward, of_input, of_weights = self.problem.layer_shares(kind, r)
            costs, parts = self.problem.costs(kind, r), self.problem.gradient_costs(kind, r)
            split = of_input * parts.forward_seconds + of_weights * parts.backward_seconds
            whole = np.maximum(of_input, of_weights) * costs.backward_seconds
            least = np.where(self.problem.splits_per_layer, np.minimum(split, whole), whole)
            return np.asarray(forward * costs.forward_seconds + least)

        return self._table(of)

    def device_seconds(self, load: Floats) -> Floats:
        """Device-seconds of a microbatch on kind k with the best split, shape (K, L)."""
        numbers = np.array(self.numbers)[None, :, None]
        return np.asarray((numbers * load).min(axis=1))

    @cached_property
    def ring(self) -> tuple[Floats, Floats]:
        """Bandwidth and latency of the best ring of r devices, shapes (V,), r = 1 .. V.

        Each device of a group has links to r - 1 others, so the (r - 1)-th best link of some device
        is at least as good as the worst link of any group.
        """
        bandwidth, latency = self.problem.cluster.pairs.nearest()
        return np.append(np.inf, bandwidth), np.append(0.0, latency)

    def all_reduce(self, r: int) -> Floats:
        """Least seconds of a layer's all-reduce among r devices, shape (L,)."""
        bandwidth, latency = (float(one[r - 1]) for one in self.ring)
        moved, cluster = self.problem.chain.parameter_bytes, self.problem.cluster
        return 2 * ring_seconds(r, moved, bandwidth, latency, cluster.all_reduce_slowdown)

    def slowest_of(self, r: int, seconds: Floats) -> Floats:
        """The least time of the slowest of r devices, shape (L,), from times per kind (K, L)."""
        order = np.argsort(seconds, axis=0)
        so_many = np.cumsum(np.bincount(self.kind_of)[order], axis=0)
        kind = np.take_along_axis(order, np.argmax(so_many >= r, axis=0)[None, :], axis=0)
        return np.asarray(np.take_along_axis(seconds, kind, axis=0)[0])

    def _table(self, of: Callable[[str, int], Floats]) -> Floats:
        """Values of ``of`` per kind and number of devices; inf where a layer does not fit."""
        kinds, memory = self.problem.kinds, self.problem.memory_bytes * (1 + MARGIN)
        values = np.array([[of(kind, r) for r in self.numbers] for kind in kinds])
        largest = [memory[self.kind_of == k].max() for k in range(len(kinds))]
        room = self.needs <= np.array(largest)[:, None, None]
        return np.where(room & self.possible, values, np.inf)


LOAD = "load of all device kinds"
LAYER = "longest layer with its all-reduce"
COPIES = "copies of the layers that fit in memory"
PATH = "way of one microbatch"
LAYER_PATH = "longest layer and the way around it"


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
    return LinearProgram(
        cost=np.append(np.zeros(kinds), -np.ones(costs)),
        matrix=sparse.csr_array(sparse.vstack([matrix, counts[None, :]])),
        row_lower=np.append(np.zeros(rows), 1.0),
        row_upper=np.append(np.full(rows, np.inf), 1.0),
        lower=np.zeros(kinds + costs),
        upper=np.full(kinds + costs, np.inf),
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
    states, kept = times.state_bytes, times.state_bytes > 0
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
    back, all_of_it = map(_least, times.backwards(whole))
    ahead = np.append(np.cumsum(back[::-1])[::-1], 0.0)[1:]  # of the layers after l
    last = ahead + all_of_it + times.update.min(axis=0)
    return float(_least(times.forward).sum() + last.max())


def layer_path_bound(problem: PipelineProblem, whole: bool) -> float:
    """The path to a layer, all its work, and the path after it; ``whole`` as in `path_bound`.

    The last of a device's forwards has the way through the later layers and back ahead, and all its
    backwards follow the first one's. The backward path to the first layer follows the last backward
    (or input gradient); the all-reduce and the optimizer step follow all the work.
    """
    times, layers = LeastTimes(problem), len(problem.chain)
    gradient, backward = times.backwards(whole)
    forward, back = _least(times.forward), _least(gradient)
    steps = times.update.min(axis=0)
    head = np.cumsum(forward) - forward
    # The backward path through the layers before l ends with the first layer's W and update.
    first = float(_least(backward)[0] + steps[0])
    tail = np.where(np.arange(layers) > 0, first + np.cumsum(back) - back - back[0], 0.0)
    around = np.append(np.cumsum((forward + back)[::-1])[::-1], 0.0)[1:]  # of the layers after l
    best = np.full(layers, np.inf)
    parts = [times.forward, backward, times.forward + backward]
    parts += [] if whole else [gradient, times.forward + gradient]
    for r in times.worthwhile:
        ring, step = times.all_reduce(r), times.slowest_of(r, times.update)
        for f, b, work, *of_gradient in zip(*(_busy(times, one, r) for one in parts), strict=True):
            i, sent = of_gradient or (b, work)
            returned = around + np.maximum(f + _least(backward), forward + b)
            passed = around + np.maximum(f + back, forward + i)
            ends = np.maximum(work, returned) + ring + step, np.maximum(sent, passed) + tail
            best = np.minimum(best, head + np.maximum(*ends))
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


def without_useless(problem: PipelineProblem) -> PipelineProblem:
    """The problem without the devices on which no layer fits, by the samples or their memory.

    Every plan of tensor degree 1 without shards is a plan of it. The problem itself if all devices
    have room, or none.
    """
    chain, count = problem.chain, len(problem.cluster)
    split = np.arange(1, min(count, int(problem.replicas_per_layer.max())) + 1)
    states = chain.parameter_bytes * least_state_factor(problem)
    needs = np.array([problem.saved_per_layer(r) for r in split.tolist()]) + states
    needs = np.where(split[:, None] <= problem.replicas_per_layer, needs, np.inf)
    kept = np.flatnonzero(needs.min() <= problem.memory_bytes * (1 + MARGIN))
    if len(kept) in (0, count):
        return problem
    fewer = reordered(problem.cluster, kept.tolist())
    return without_useless(replace(problem, cluster=fewer))


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
