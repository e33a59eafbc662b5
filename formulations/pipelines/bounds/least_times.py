"""The least times of each layer, for the bounds of :mod:`every_plan`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.plans.memory import least_state_factor
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.arrays import Floats

MARGIN = 1e-9  # relative; rounding of sums of bytes


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
        return self._table(lambda kind, r: self.problem.costs(kind, r).backward_seconds)

    @cached_property
    def gradient(self) -> Floats:
        """Seconds until the input gradient can be sent, shape (K, R, L).

        The whole backward if the layer has no separate times for its parts.
        """
        parts = self._table(lambda kind, r: self.problem.gradient_costs(kind, r).forward_seconds)
        return np.where(self.splits, parts, self.backward)

    @cached_property
    def splits(self) -> NDArray[np.bool_]:
        """Whether a layer has the times of both parts of its backward, shape (L,)."""
        layers = self.problem.chain.layers
        return np.array(
            [all(c.backward_seconds is None for c in layer.costs_at(1)) for layer in layers]
        )

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
            return np.asarray(forward * costs.forward_seconds + np.where(self.splits, split, whole))

        return self._table(of)

    def device_seconds(self, load: Floats) -> Floats:
        """Device-seconds of a microbatch on kind k with the best split, shape (K, L)."""
        numbers = np.array(self.numbers)[None, :, None]
        return np.asarray((numbers * load).min(axis=1))

    @cached_property
    def ring(self) -> tuple[Floats, Floats]:
        """Seconds per byte and latency of the best ring of r devices, shapes (V,), r = 1 .. V.

        Each device of a group has links to r - 1 others, so the (r - 1)-th best link of some device
        is at least as good as the worst link of any group.
        """
        bandwidth, latency = self.problem.cluster.pairs.nearest()
        return np.append(0.0, 1 / bandwidth), np.append(0.0, latency)

    def all_reduce(self, r: int) -> Floats:
        """Least seconds of a layer's all-reduce among r devices, shape (L,)."""
        seconds_per_byte, latency = self.ring
        volume = 2 * (r - 1) / r * self.problem.chain.parameter_bytes
        volume *= self.problem.cluster.all_reduce_slowdown
        return np.asarray(volume * seconds_per_byte[r - 1] + 2 * (r - 1) * latency[r - 1])

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
