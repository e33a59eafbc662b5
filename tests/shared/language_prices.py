"""Prices of the language of finite plans, read from the documents of a model and a cluster.

Plain Python, no import of stagewright: the oracle (:mod:`language_oracle`) and the plain checker
(:mod:`language_check`) stand on this file alone, so they share no mistake with the product.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import inf


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [start, stop) on ``devices`` (indices), as the plan document states them."""

    start: int
    stop: int
    devices: tuple[int, ...]
    replication: str = "split"
    recompute: str = "none"
    offload: bool = False

    @property
    def degree(self):
        """Into how many shares a microbatch is divided."""
        return len(self.devices) if self.replication == "split" else 1

    def runners(self, microbatch):
        """The devices that run this microbatch."""
        if self.replication == "split":
            return self.devices
        return (self.devices[microbatch % len(self.devices)],)


class Instance:
    """One model on one cluster with ``microbatches`` microbatches."""

    def __init__(self, model, cluster, microbatches, memory_limit=None):
        self.layers = model["layers"]
        self.microbatches = microbatches
        self.samples = model["microbatch_size"]
        self.copies = 2 + model["optimizer_bytes_per_parameter_byte"]
        devices = cluster["devices"]
        self.names = [device["name"] for device in devices]
        self.kinds = [device["kind"] for device in devices]
        limit = inf if memory_limit is None else memory_limit
        self.memory = [min(device["memory_bytes"], limit) for device in devices]
        self.host = [device.get("host_bytes_per_second") for device in devices]
        self.bandwidth, self.latency = _links(cluster)
        self.message = cluster.get("message_seconds") or 0
        self.reached = cluster.get("all_reduce_share") or 1  # of the bandwidth, by an all-reduce
        # Stages of the search ask for the same few sums again and again.
        self.value = lru_cache(None)(self._value)
        self.compute_seconds = lru_cache(None)(self._compute_seconds)
        self.saved = lru_cache(None)(self._saved)
        self.static_bytes = lru_cache(None)(self._static_bytes)
        self.transfer_seconds = lru_cache(None)(self._transfer_seconds)

    # Costs of layers.

    def _value(self, layer, kind, field, samples):
        """A field at ``samples``: linear between measured sizes, proportional below them."""
        entries = self.layers[layer]["costs"]
        own = [entry for entry in entries if entry.get("device_kind") == kind]
        own = own or [entry for entry in entries if entry.get("device_kind") is None]
        points = sorted((entry["microbatch_size"], _field(entry, field)) for entry in own)
        size, value = points[0]
        if samples <= size:
            return value * samples / size
        for (low, at_low), (high, at_high) in pairwise(points):
            if samples <= high:
                return at_low + (at_high - at_low) * (samples - low) / (high - low)
        raise ValueError(f"layer {layer}: {samples} samples are more than measured")

    def largest(self, layer, field, samples):
        """The largest value over the kinds in the cluster."""
        return max(self.value(layer, kind, field, samples) for kind in set(self.kinds))

    def share(self, stage):
        """The largest share of a microbatch: whole samples."""
        return -(-self.samples // stage.degree)

    def enough_samples(self, stage):
        """Whether the smallest share is large enough for every layer of the stage."""
        layers = self.layers[stage.start : stage.stop]
        least = max(layer.get("min_samples", 1) for layer in layers)
        return self.samples // stage.degree >= least

    def knows_parts(self, stage):
        """Whether every layer knows the two parts of its backward."""
        return all(
            "input_gradient_seconds" in entry
            for layer in self.layers[stage.start : stage.stop]
            for entry in layer["costs"]
        )

    def _compute_seconds(self, start, stop, kinds, field, share):
        return max(
            sum(self.value(layer, kind, field, share) for layer in range(start, stop))
            for kind in kinds
        )

    def seconds(self, stage, runners, action):
        """Seconds of action F, B, I or W of one microbatch on its runners."""
        field = {
            "F": "forward_seconds",
            "B": "backward_seconds",
            "I": "input_gradient_seconds",
            "W": "weight_gradient_seconds",
        }[action]
        kinds = frozenset(self.kinds[device] for device in runners)
        share = self.share(stage)
        time = self.compute_seconds(stage.start, stage.stop, kinds, field, share)
        if action in "BI" and stage.recompute != "none":
            time += self.compute_seconds(stage.start, stage.stop, kinds, "forward_seconds", share)
        return time

    def own_seconds(self, stages, index, microbatch, action):
        """Seconds of an action for messages: one with each device that runs a neighbour."""
        runners, near = stages[index].runners(microbatch), (index - 1, index + 1)
        others = [stages[i].runners(microbatch) for i in near if 0 <= i < len(stages)]
        count = sum(len(those) for those in others if those != runners)
        return 0 if action == "W" else self.message * count

    def update_seconds(self, stage):
        """Seconds of the optimizer's step of the stage."""
        layers = self.layers[stage.start : stage.stop]
        return max(
            sum(_update(layer, self.kinds[device]) for layer in layers) for device in stage.devices
        )

    # Transfers.

    def _transfer_seconds(self, layer, senders, receivers):
        """Seconds of the output of ``layer`` from senders to receivers; inf without a link."""
        pairs = [(i, j) for i, j in product(senders, receivers) if i != j]
        count = len(senders) * len(receivers)
        samples = -(-self.samples // count)
        size = self.boundary_bytes(layer) * samples / self.samples
        slowest = min(self.bandwidth[i][j] for i, j in pairs)
        if slowest == 0:
            return inf
        return size / slowest + max(self.latency[i][j] for i, j in pairs)

    def all_reduce_seconds(self, stage):
        """Seconds of the all-reduce of a replicated stage; inf without a link."""
        k = len(stage.devices)
        pairs = [(i, j) for i, j in product(stage.devices, stage.devices) if i != j]
        slowest = min(self.bandwidth[i][j] for i, j in pairs)
        if slowest == 0:
            return inf
        latency = 2 * (k - 1) * max(self.latency[i][j] for i, j in pairs)
        seconds = 2 * (k - 1) / k * self.parameter_bytes(stage) / slowest
        return seconds / self.reached + latency

    # Memory.

    def boundary_bytes(self, layer):
        """Bytes of the output of ``layer`` at a whole microbatch; none before the first layer."""
        return self.largest(layer, "output_bytes", self.samples) if layer >= 0 else 0

    def parameter_bytes(self, stage):
        return sum(layer["parameter_bytes"] for layer in self.layers[stage.start : stage.stop])

    def _static_bytes(self, stage, copies):
        front = self.boundary_bytes(stage.start - 1) if stage.start > 0 else 0
        behind = self.boundary_bytes(stage.stop - 1) if stage.stop < len(self.layers) else 0
        part = self.share(stage) / self.samples
        return self.parameter_bytes(stage) * copies + 2 * (front + behind) * part

    def static(self, stage, extra_copies=0):
        """Bytes of a stage on each of its devices at any time."""
        return self.static_bytes(stage, self.copies + extra_copies)

    def _saved(self, layer, share):
        return self.largest(layer, "saved_bytes", share)

    def held(self, stage):
        """Bytes of a microbatch from the start of F to the end of its backward."""
        share = self.share(stage)
        part = share / self.samples
        if stage.recompute == "full":
            return self.boundary_bytes(stage.start - 1) * part
        layers = range(stage.start, stage.stop)
        if stage.recompute == "layer":
            return sum(self.boundary_bytes(layer - 1) * part for layer in layers)
        return sum(self.saved(layer, share) for layer in layers)

    def recomputed(self, stage, whole):
        """Further bytes of a microbatch from the start of B (or I) to the end of its backward."""
        if stage.recompute == "none":
            return 0
        saved = [self.saved(layer, self.share(stage)) for layer in range(stage.start, stage.stop)]
        return max(saved) if stage.recompute == "layer" and whole else sum(saved)

    def waiting(self, stage, microbatches):
        """Bytes of output gradients of microbatches between I and W, beyond the stage's buffers."""
        part, total = self.share(stage) / self.samples, 0
        for layer in range(stage.start, stage.stop):
            buffers = 1 if layer == stage.stop - 1 and stage.stop < len(self.layers) else 0
            total += max(0, microbatches - buffers) * self.boundary_bytes(layer) * part
        return total

    def host_seconds(self, stage, runners):
        """Seconds to write a microbatch's saved bytes to the host, or to read them."""
        return self.held(stage) / min(self.host[device] for device in runners)


def _field(entry, field):
    if field == "backward_seconds" and field not in entry:
        return entry["input_gradient_seconds"] + entry["weight_gradient_seconds"]
    return entry[field]


def _update(layer, kind):
    """Seconds of the optimizer's step of a layer; every measured size of a kind says the same."""
    own = [entry for entry in layer["costs"] if entry.get("device_kind") == kind]
    own = own or [entry for entry in layer["costs"] if entry.get("device_kind") is None]
    return own[0].get("update_seconds", 0)


def _links(cluster):
    """Bandwidth (0: no link) and latency of every ordered pair."""
    links, count = cluster["links"], len(cluster["devices"])
    if "servers" in links and "intra" in links:
        server = {name: index for index, names in enumerate(links["servers"]) for name in names}
        homes = [server[device["name"]] for device in cluster["devices"]]
        between = [[links["intra" if i == j else "inter"] for j in homes] for i in homes]
        bandwidth = [[link["bandwidth_bytes_per_second"] for link in row] for row in between]
        return bandwidth, [[link["latency_seconds"] for link in row] for row in between]
    bandwidth = [[value or 0 for value in row] for row in links["bandwidth_bytes_per_second"]]
    latency = links["latency_seconds"]
    if not isinstance(latency, list):
        latency = [[latency] * count for _ in range(count)]
    return bandwidth, latency
