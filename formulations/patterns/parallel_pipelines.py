"""Parallel pipelines of PipeDream-2BW and PipeDream-Flush (Narayanan's thesis, section 3.3).

A configuration has ``depth`` stages with ``width`` replicas each. Microbatch k of a pipeline, from
1, uses version max(floor((k - 1) / m) - 1, 0) of the weights (3.2.1); here m is any whole number of
at least ``depth``, of which the thesis writes the multiples g * depth.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from stagewright.formulations.pipelines.bppm import prefix_sums
from stagewright.formulations.plans.weight_rules import DOUBLE_BUFFER, WeightRule
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.chain import Chain, ChainCosts, profile_on

Recomputation = Literal["none", "full"]


@dataclass(frozen=True, slots=True)
class Configuration:
    """``width`` pipelines of ``depth`` stages.

    Each pipeline runs ``microbatches`` of ``microbatch_size`` samples between two updates.
    """

    width: int
    depth: int
    microbatch_size: int
    microbatches: int
    recompute: Recomputation = "none"

    @property
    def samples(self) -> int:
        """Samples that the replicas of a stage process at a time."""
        return self.width * self.microbatch_size

    @property
    def batch(self) -> int:
        """Samples between two updates."""
        return self.samples * self.microbatches

    @property
    def accumulation(self) -> float:
        """The thesis's g = B / (d p b), whole where ``depth`` divides ``microbatches``."""
        return self.microbatches / self.depth

    def __str__(self) -> str:
        again = "" if self.recompute == "none" else ", recomputed"
        return (
            f"d={self.width} p={self.depth} b={self.microbatch_size} m={self.microbatches} "
            f"(g={self.accumulation:g}){again}"
        )


@dataclass(frozen=True, slots=True)
class Line:
    """The configurations that differ in their depth only, which is 1 to ``most``."""

    width: int
    microbatch_size: int
    microbatches: int
    recompute: Recomputation
    most: int

    def at(self, depth: int) -> Configuration:
        """The configuration of that depth."""
        return Configuration(
            self.width, depth, self.microbatch_size, self.microbatches, self.recompute
        )


@dataclass(frozen=True, slots=True)
class Family:
    """The configurations of a batch on ``devices`` devices; a stage has at least one of ``layers``.

    Attributes
    ----------
    batch
        Samples between two updates.
    samples
        What the replicas of a stage may process at a time; those that divide the batch are used.
    width
        The number of replicas; None: any.
    least_samples
        The least that a device may process at a time.
    """

    batch: int
    devices: int
    layers: int
    samples: tuple[int, ...]
    width: int | None = None
    least_samples: int = 1
    recompute: tuple[Recomputation, ...] = ("none", "full")

    def lines(self) -> Iterator[Line]:
        """All configurations with d p <= devices, d b m = batch and m >= p."""
        for samples in self.samples:
            if self.batch % samples:
                continue
            m = self.batch // samples
            for width in divisors(samples) if self.width is None else (self.width,):
                size, rest = divmod(samples, width)
                most = min(self.devices // width, self.layers, m)
                if rest == 0 and size >= self.least_samples and most > 0:
                    for recompute in self.recompute:
                        yield Line(width, size, m, recompute, most)


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """The stages of every depth in sequence: those of depth p begin at ``first[p - 1]``."""

    start: Ints
    stop: Ints
    first: Ints

    @classmethod
    def of(cls, cuts: list[Ints]) -> "Stages":
        """The stages of the cuts of depth 1, 2, ..., each from 0 to the number of layers."""
        lengths = [len(one) - 1 for one in cuts]
        return cls(
            np.concatenate([one[:-1] for one in cuts]),
            np.concatenate([one[1:] for one in cuts]),
            np.cumsum([0, *lengths[:-1]]),
        )

    @property
    def depth(self) -> Ints:
        """The depth of the pipeline of every stage."""
        return np.repeat(np.arange(1, len(self.first) + 1), np.diff([*self.first, len(self.start)]))

    def sums(self, per_layer: Floats) -> Floats:
        """The sum over the layers of every stage."""
        sums = prefix_sums(per_layer)
        return np.asarray(sums[self.stop] - sums[self.start])

    def most(self, per_stage: Floats) -> Floats:
        """The largest value of each depth, shape (P,)."""
        return np.asarray(np.maximum.reduceat(per_stage, self.first))


def equal_cuts(layers: int, depth: int) -> Ints:
    """Cuts into stages of equal numbers of layers, the first ones larger by one if need be."""
    each, more = divmod(layers, depth)
    return np.concatenate([[0], np.cumsum(np.full(depth, each) + (np.arange(depth) < more))])


@dataclass(frozen=True)
class ClosedForm:
    """The cost functions THROUGHPUT and MEMORY of section 3.3.3, on equal numbers of layers.

    Of the slowest kind of device and the least memory. Readings: replicas are on one server if
    there are at most as many as it has devices, a pipeline if all its stages with their replicas
    are; an all-reduce moves 2 (d - 1) / d of the gradients; the boundaries of a stage are its own,
    so that the first receives nothing. With a flush, which 3.3.3 leaves out, the bubble is
    (p - 1) / m and the all-reduce is not hidden. Latencies, optimizer steps and states are not
    counted: |W| is the weights alone.
    """

    chain: Chain
    cluster: Cluster
    rule: WeightRule = DOUBLE_BUFFER
    memory_bytes: float = field(default=np.inf)

    def floors(self, line: Line) -> Floats:
        """Seconds of an iteration by depth, shape (most,); inf where memory is exceeded."""
        seconds = self.iteration_seconds(line)
        return np.where(self.memory(line) <= self.room_bytes, seconds, np.inf)

    def seconds(self, one: Configuration) -> float:
        """Seconds of an iteration; inf if memory is exceeded."""
        line = Line(one.width, one.microbatch_size, one.microbatches, one.recompute, one.depth)
        return float(self.floors(line)[-1])

    def iteration_seconds(self, line: Line) -> Floats:
        """The time t of a microbatch m times, with a flush p - 1 times more; shape (most,)."""
        costs, stages = self._at(line.microbatch_size), self._stages
        extra = 1.0 if line.recompute == "none" else 4 / 3
        compute = extra * stages.sums(costs.forward_seconds + costs.backward_seconds)
        reduced = 2 * (line.width - 1) / line.width * stages.sums(self.chain.parameter_bytes)
        reduced = reduced / self._cross_bandwidth(line.width)
        busy = compute + self._sent_bytes(costs) / self._inner_bandwidth(line.width)
        if self.rule.may_overlap:
            each = stages.most(np.maximum(busy, reduced / line.microbatches))
            return line.microbatches * each[: line.most]
        turns = line.microbatches + np.arange(len(stages.first))
        return (turns * stages.most(busy) + stages.most(reduced))[: line.most]

    def memory(self, line: Line) -> Floats:
        """Bytes of the largest stage, shape (most,): weights, activations and their inputs."""
        costs, stages = self._at(line.microbatch_size), self._stages
        kept = stages.depth if line.recompute == "none" else 1
        received = np.append(0.0, costs.output_bytes[:-1])[stages.start]
        need = self.rule.versions * stages.sums(self.chain.parameter_bytes)
        need = need + kept * stages.sums(costs.saved_bytes) + stages.depth * received
        return stages.most(need)[: line.most]

    @cached_property
    def room_bytes(self) -> float:
        """The memory of the smallest device, or the limit."""
        return min(self.memory_bytes, *(one.memory_bytes for one in self.cluster.devices))

    def _sent_bytes(self, costs: ChainCosts) -> Floats:
        """Bytes over both boundaries of every stage, there and back."""
        passed = np.concatenate([[0.0], costs.output_bytes[:-1], [0.0]])
        return np.asarray(2 * (passed[self._stages.start] + passed[self._stages.stop]))

    def _cross_bandwidth(self, width: int) -> float:
        return self._bandwidths[width > self._server]

    def _inner_bandwidth(self, width: int) -> Floats:
        inside, slowest = self._bandwidths
        return np.where(width * self._stages.depth > self._server, slowest, inside)

    @cached_property
    def _server(self) -> int:
        return min(len(server) for server in self.cluster.servers)

    @cached_property
    def _bandwidths(self) -> tuple[float, float]:
        """Bandwidths of the slowest link in a server, and of the slowest link of all."""
        every, pairs = range(len(self.cluster)), self.cluster.pairs
        inside = min(pairs.slowest(server, server)[0] for server in self.cluster.servers)
        return inside, pairs.slowest(every, every)[0]

    @cached_property
    def _stages(self) -> Stages:
        layers = len(self.chain)
        depths = range(1, min(layers, len(self.cluster)) + 1)
        return Stages.of([equal_cuts(layers, depth) for depth in depths])

    def _at(self, samples: int) -> ChainCosts:
        """The largest costs over the kinds of devices."""
        if samples not in self._known:
            kinds = sorted({device.kind for device in self.cluster.devices})
            every = [profile_on(self.chain, kind).at(samples) for kind in kinds]
            names = ("forward_seconds", "backward_seconds", "saved_bytes", "output_bytes")
            found = [np.max([getattr(one, name) for one in every], axis=0) for name in names]
            self._known[samples] = ChainCosts(*found)
        return self._known[samples]

    @cached_property
    def _known(self) -> dict[int, ChainCosts]:
        return {}


def weight_version(k: int, microbatches: int) -> int:
    """The version of the weights that microbatch ``k`` of a pipeline uses, counted from 1."""
    return max((k - 1) // microbatches - 1, 0)


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def samples_of(chain: Chain, batch: int) -> tuple[int, ...]:
    """The measured numbers of samples of ``chain``, between the least and the most, in ``batch``.

    Raises
    ------
    InputError
        If no number of samples divides the batch; names the nearest batches that work.
    """
    if batch < 1:
        raise InputError(f"the batch must be at least 1 sample, got {batch}")
    measured = [[cost.microbatch_size for cost in layer.costs_at(1)] for layer in chain.layers]
    least, most = max(map(min, measured)), min(map(max, measured))

    def fitting(samples: int) -> tuple[int, ...]:
        return tuple(n for n in divisors(samples) if least <= n <= most)

    found = fitting(batch)
    if not found:
        near = [step for step in range(1, most + 1) for step in (batch - step, batch + step)]
        working = sorted([one for one in near if one > 0 and fitting(one)][:2])
        sizes = f"{least}" if least == most else f"{least} to {most}"
        raise InputError(
            f"a batch of {batch} samples is no whole number of microbatches of {sizes} samples, "
            f"for which model {chain.name!r} has costs: use a batch of "
            f"{' or '.join(map(str, working))}, or measure other sizes"
        )
    return found
