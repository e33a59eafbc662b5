"""The pipeline planning problem (model, cluster, number of microbatches) and its cost model.

Every planner and checker takes its seconds from here and from `timing`, its bytes from `memory`;
what a transfer and a collective cost is in :mod:`stagewright.formulations.prices.collectives`.
Sources: SPP section III (inter-stage transfers with the erratum
``c = d / (|F(s)| |F(s+1)| min b)``, equation 1 for the all-reduce), with latencies added.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.prices.collectives import link_seconds, message_price, ring_seconds
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_MICROBATCHES, MIN_MEMORY, require_count
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.chain import (
    Chain,
    ChainCosts,
    LayerCost,
    Profile,
    profile_on,
    require_kernel_share,
    shares_on,
    update_seconds_on,
)
from stagewright.graphs.models.sharding import shard_chain

T = TypeVar("T")
Key = TypeVarTuple("Key")
_MOST = 100_000  # values of a function that are kept


def remembered(
    function: Callable[["PipelineProblem", *Key], T],
) -> Callable[["PipelineProblem", *Key], T]:
    """The function of a problem and of hashable values, which searches ask again and again."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def known(problem: "PipelineProblem", *key: *Key) -> T:
        table: dict[tuple[*Key], T] = problem.known[name]
        found = table.get(key)
        if found is None:
            if len(table) >= _MOST:
                table.clear()
            found = table[key] = function(problem, *key)
        return found

    return known


@dataclass(frozen=True)
class PipelineProblem:
    """Minimise the time of a training iteration of ``chain`` on ``cluster``.

    Devices of a plan are given by their positions in ``cluster.devices``. Samples are not split:
    when r devices share a microbatch of b samples, the largest share is ceil(b / r) samples, and
    a replicated stage takes the time of its slowest device for that share. ``microbatch_size``
    (None: the chain's own) is the planned size in place of the chain's.
    """

    chain: Chain
    cluster: Cluster
    microbatches: int
    memory_limit_bytes: float | None = None  # caps the memory of every device
    assumed_share: float | None = None  # of a device, by kernels whose share is not known; None: 1
    microbatch_size: int | None = None

    def __post_init__(self) -> None:
        if self.microbatch_size is not None:
            planned = replace(self.chain, microbatch_size=self.microbatch_size)
            object.__setattr__(self, "chain", planned)
        require_count(self.microbatches, "microbatches", MAX_MICROBATCHES)
        limit = self.memory_limit_bytes
        if limit is not None and not MIN_MEMORY <= limit < math.inf:
            raise InputError(
                f"the memory limit must be at least {MIN_MEMORY:g} bytes, got {limit:g}: is a "
                f"unit missing? Write for example 8GB"
            )
        if self.assumed_share is not None:
            require_kernel_share(self.assumed_share, "the assumed share")
        self._require_samples()

    @cached_property
    def digest(self) -> str:
        """Identifies the problem; a plan carries the digest of its problem."""
        parts = [self.chain.digest(), self.cluster.digest(), str(self.microbatches)]
        if self.memory_limit_bytes is not None:
            parts.append(repr(float(self.memory_limit_bytes)))
        if self.assumed_share is not None:
            parts.append(f"share {float(self.assumed_share)!r}")
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    @cached_property
    def known(self) -> defaultdict[str, dict[Any, Any]]:
        """The values of functions that are :func:`remembered`, by their arguments."""
        return defaultdict(dict)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The device kinds of the cluster, sorted."""
        return tuple(sorted({device.kind for device in self.cluster.devices}))

    @cached_property
    def memory_bytes(self) -> Floats:
        """Usable memory of every device, shape (V,)."""
        given = np.array([device.memory_bytes for device in self.cluster.devices])
        limit = self.memory_limit_bytes
        return given if limit is None else np.minimum(given, limit)

    def at(self, degree: int) -> "PipelineProblem":
        """The problem of one of ``degree`` devices that compute every layer together.

        Costs and parameters are those of a shard; layers without costs at that degree stay whole.
        """
        return self if degree == 1 else self._sharded(degree)

    @remembered
    def _sharded(self, degree: int) -> "PipelineProblem":
        return replace(self, chain=shard_chain(self.chain, degree))

    def samples(self, shares: int) -> int:
        """Samples in the largest of ``shares`` shares of a microbatch."""
        return -(-self.chain.microbatch_size // shares)

    def most_replicas(self, start: int, stop: int) -> int:
        """The most devices among which a stage of layers [start, stop) can split a microbatch.

        The smallest share, floor(b / r) samples, must be enough for every layer.
        """
        return int(self.replicas_per_layer[start:stop].min())

    @cached_property
    def replicas_per_layer(self) -> NDArray[np.int64]:
        """The most devices among which each layer can be split, shape (L,)."""
        return self.chain.microbatch_size // self.chain.min_samples

    def costs(self, kind: str, replicas: int) -> ChainCosts:
        """Costs of every layer for the largest of ``replicas`` shares of a microbatch."""
        return self._costs_at(kind, self.samples(replicas))

    @remembered
    def _costs_at(self, kind: str, samples: int) -> ChainCosts:
        return self._profiles[kind].at(samples)

    @cached_property
    def _profiles(self) -> dict[str, Profile]:
        return {kind: profile_on(self.chain, kind) for kind in self.kinds}

    def compute_seconds(self, start: int, stop: int, devices: Sequence[int]) -> tuple[float, float]:
        """Forward and backward time of layers [start, stop) for a microbatch split on devices."""
        kinds = {self.cluster.devices[v].kind for v in devices}
        return _slowest([self.costs(kind, len(devices)) for kind in sorted(kinds)], start, stop)

    def gradient_seconds(
        self, start: int, stop: int, devices: Sequence[int]
    ) -> tuple[float, float]:
        """Time of the input gradient and of the weight gradient, the two parts of the backward.

        Together they may take longer than a whole one. Only for layers with both times, see
        :meth:`layer_with_whole_backward`.
        """
        kinds = {self.cluster.devices[v].kind for v in devices}
        parts = [self.gradient_costs(kind, len(devices)) for kind in sorted(kinds)]
        return _slowest(parts, start, stop)

    def gradient_costs(self, kind: str, replicas: int) -> ChainCosts:
        """As :meth:`costs`, with the input gradient as forward, the weight gradient as backward.

        Layers with only a whole backward count 0.
        """
        return self._gradient_costs_at(kind, self.samples(replicas))

    @remembered
    def _gradient_costs_at(self, kind: str, samples: int) -> ChainCosts:
        return self._gradient_profiles[kind].at(samples)

    def layer_with_whole_backward(self, start: int, stop: int) -> str | None:
        """The first of layers [start, stop) with only the time of a whole backward."""
        whole = np.flatnonzero(~self.splits_per_layer[start:stop])
        return self.chain.layers[start + int(whole[0])].name if len(whole) else None

    @cached_property
    def splits_per_layer(self) -> NDArray[np.bool_]:
        """Whether each layer has the times of both parts of its backward, shape (L,)."""
        return np.array(
            [all(cost.has_parts for cost in layer.costs_at(1)) for layer in self.chain.layers]
        )

    def least_backward(self, kind: str, replicas: int) -> tuple[Floats, Floats]:
        """Seconds until the input's gradient can be sent, and of all of the backward, (L,) each.

        Of a whole backward or of one in parts, whichever takes less.
        """
        whole = self.costs(kind, replicas).backward_seconds
        parts = self.gradient_costs(kind, replicas)
        split = parts.forward_seconds, parts.forward_seconds + parts.backward_seconds
        gradient, every = (
            np.where(self.splits_per_layer, np.minimum(whole, one), whole) for one in split
        )
        return gradient, every

    @cached_property
    def knows_shares(self) -> bool:
        """Whether the share of a device that a kernel occupies is known, or assumed."""
        costs = (cost for layer in self.chain.layers for cost in layer.costs_at(1))
        stated = (one for cost in costs for one in cost.shares)
        return self.assumed_share is not None or any(one is not None for one in stated)

    def layer_shares(self, kind: str, replicas: int) -> Floats:
        """Shares of a device that each layer's kernels occupy, shape (3, L).

        Rows are forward, input gradient and weight gradient, of the largest of ``replicas`` shares
        of a microbatch. A kernel of unknown share leaves no room beside it.
        """
        return self._shares_at(kind, self.samples(replicas))

    @remembered
    def _shares_at(self, kind: str, samples: int) -> Floats:
        return shares_on(self.chain, kind, samples, self.assumed_share or 1.0)

    def kernel_shares(
        self, start: int, stop: int, devices: Sequence[int]
    ) -> tuple[float, float, float]:
        """The largest shares of layers [start, stop): forward, input gradient, weight gradient."""
        kinds = {self.cluster.devices[v].kind for v in devices}
        every = [self.layer_shares(kind, len(devices))[:, start:stop].max(axis=1) for kind in kinds]
        forward, of_input, of_weights = np.max(every, axis=0).tolist()
        return forward, of_input, of_weights

    @cached_property
    def _gradient_profiles(self) -> dict[str, Profile]:
        """Profiles with the input gradient as forward and the weight gradient as backward.

        They are interpolated at other microbatch sizes as the costs are.
        """
        layers = tuple(
            replace(layer, costs=tuple(_parts(cost) for cost in layer.costs))
            for layer in self.chain.layers
        )
        chain = replace(self.chain, layers=layers)
        return {kind: profile_on(chain, kind) for kind in self.kinds}

    def boundary_bytes(self, stop: int) -> float:
        """Bytes that a whole microbatch passes from layer ``stop - 1`` to layer ``stop``.

        The largest over the device kinds, should they differ.
        """
        return float(self._output_bytes[stop - 1])

    @cached_property
    def _output_bytes(self) -> Floats:
        return np.asarray(np.max([self.costs(kind, 1).output_bytes for kind in self.kinds], axis=0))

    def transfer_seconds(
        self, stop: int, senders: Sequence[int], receivers: Sequence[int]
    ) -> tuple[float, float]:
        """Time of the activations after layer ``stop - 1``, and of their gradients back.

        Every sender sends a share to every receiver, in whole samples; the time is that of the
        largest share on the slowest link (SPP section III-B).
        """
        share = self.share_bytes(self.boundary_bytes(stop), len(senders) * len(receivers))
        there, late_there = self._slowest_link(tuple(senders), tuple(receivers))
        back, late_back = self._slowest_link(tuple(receivers), tuple(senders))
        return link_seconds(share, there, late_there), link_seconds(share, back, late_back)

    def message_seconds(self, stop: int, senders: int, receivers: int) -> float:
        """A device's own time for a message after layer ``stop - 1``, sent or received.

        It is one from one of ``senders`` to one of ``receivers``, as of `transfer_seconds`.
        """
        cluster, samples = self.cluster, self.chain.microbatch_size
        price = cluster.message_seconds, cluster.message_bytes_per_second
        return message_price(self.boundary_bytes(stop), samples, senders * receivers, *price)

    @remembered
    def _slowest_link(self, ones: tuple[int, ...], others: tuple[int, ...]) -> tuple[float, float]:
        """The slowest bandwidth and latency."""
        return self.cluster.pairs.slowest(ones, others)

    def share_bytes(self, volume: float, shares: int) -> float:
        """Bytes of the largest of ``shares`` shares of a microbatch with ``volume`` bytes."""
        return volume * self.samples(shares) / self.chain.microbatch_size

    def gradient_bytes(self, start: int, stop: int) -> float:
        """Bytes of the gradients of layers [start, stop)."""
        return float(self._parameter_bytes[start:stop].sum())

    @cached_property
    def _parameter_bytes(self) -> Floats:
        return self.chain.parameter_bytes

    def reduce_seconds(self, start: int, stop: int, devices: Sequence[int]) -> float:
        """Ring all-reduce of the gradients: 2(k-1)/k b / slowest link (SPP equation 1).

        2(k-1) steps pay the largest latency each. Zero for a single device. The bytes take longer
        where the cluster knows what share of the bandwidth an all-reduce reaches.
        """
        return 2 * self.round_seconds(self.gradient_bytes(start, stop), devices)

    def round_seconds(self, volume: float, devices: Sequence[int]) -> float:
        """Half of a ring all-reduce of ``volume`` bytes: a reduce-scatter, or an all-gather."""
        if len(devices) == 1:
            return 0.0
        bandwidth, latency = self._slowest_link(tuple(devices), tuple(devices))
        slowdown = self.cluster.all_reduce_slowdown
        return ring_seconds(len(devices), volume, bandwidth, latency, slowdown)

    def update_seconds(self, start: int, stop: int, devices: Sequence[int]) -> float:
        """Time of the optimizer step on layers [start, stop), on the slowest of ``devices``."""
        kinds = {self.cluster.devices[v].kind for v in devices}
        return max(float(self.update_per_layer(kind)[start:stop].sum()) for kind in kinds)

    def update_per_layer(self, kind: str) -> Floats:
        """Seconds of the optimizer's step per layer on devices of ``kind``, shape (L,)."""
        return self._updates[kind]

    def finish_seconds(self, start: int, stop: int, devices: Sequence[int]) -> float:
        """Time after the last backward of a stage: the all-reduce and the optimizer step."""
        reduction = self.reduce_seconds(start, stop, devices)
        return reduction + self.update_seconds(start, stop, devices)

    @cached_property
    def _updates(self) -> dict[str, Floats]:
        return {kind: update_seconds_on(self.chain, kind) for kind in self.kinds}

    def saved_bytes(self, start: int, stop: int, replicas: int) -> float:
        """Bytes that a device keeps per microbatch in flight, when ``replicas`` share it.

        Every layer counts with the largest value over the device kinds, should they differ.
        """
        return float(self.saved_per_layer(replicas)[start:stop].sum())

    def saved_per_layer(self, replicas: int) -> Floats:
        """Saved bytes of every layer, shape (L,), on one of ``replicas`` shares."""
        return self._saved_at(self.samples(replicas))

    @remembered
    def _saved_at(self, samples: int) -> Floats:
        kinds = [self._costs_at(kind, samples).saved_bytes for kind in self.kinds]
        return np.asarray(np.max(kinds, axis=0))

    def inputs_per_layer(self, replicas: int) -> Floats:
        """Bytes of every layer's input, shape (L,), on one of ``replicas`` shares.

        The first layer's input counts 0: the data are not sent.
        """
        share = self.samples(replicas) / self.chain.microbatch_size
        return np.concatenate([[0.0], self._output_bytes[:-1] * share])

    def offload_seconds(self, start: int, stop: int, devices: Sequence[int]) -> float | None:
        """Time to move all kept bytes of a microbatch to host memory, or back.

        None if some device has no ``host_bytes_per_second``.
        """
        rates = [self.cluster.devices[v].host_bytes_per_second for v in devices]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates):
            return None
        return link_seconds(self.saved_bytes(start, stop, len(devices)), min(known))

    def _require_samples(self) -> None:
        """Refuse profiles that do not cover the microbatch, and layers that need more samples."""
        assert self._profiles  # reading them checks the sizes
        for layer, replicas in zip(self.chain.layers, self.replicas_per_layer, strict=True):
            if replicas < 1:
                raise InputError(
                    f"layer {layer.name!r} needs at least {layer.min_samples} samples, the planned "
                    f"microbatch has {self.chain.microbatch_size}: plan a larger microbatch"
                )


def _slowest(costs: Sequence[ChainCosts], start: int, stop: int) -> tuple[float, float]:
    """The longest forward and the longest backward time of layers [start, stop)."""
    return (
        max(float(cost.forward_seconds[start:stop].sum()) for cost in costs),
        max(float(cost.backward_seconds[start:stop].sum()) for cost in costs),
    )


def _parts(cost: LayerCost) -> LayerCost:
    return replace(
        cost,
        forward_seconds=cost.input_gradient_seconds or 0.0,
        backward_seconds=cost.weight_gradient_seconds or 0.0,
        input_gradient_seconds=None,
        weight_gradient_seconds=None,
    )
