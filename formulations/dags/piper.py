"""Pipelines with data and tensor parallelism and recomputation (Piper, NeurIPS 2021, section 3).

A batch of N samples (the paper's microbatches) passes a pipeline of stages. Stage i has a set S_i
of layers, r_i replicas and t_i shards: it takes r_i * t_i devices. Every layer v of it runs in one
of its options for t_i shards, which say: seconds p of forward and backward of a sample, parameter
bytes w, bytes a for every sample in flight and other bytes b, all on each of the t_i devices.

The rules:

- Every layer is in exactly one stage, and no edge goes back.
- r_i divides N; the r_i sum up to at most N, the r_i * t_i to at most the number of devices.
- Memory: with y_i = ceil((r_i + r_(i+1) + ... + r_last) / r_i) samples in flight on a replica,
  the sum over the layers of a * y_i + b is at most the memory of a device.
- Time per sample of stage i, with the bandwidth B:

      (sum of p) / r_i
      + (sum over edges e of layer v that leave or enter S_i of 2 * (bytes_e + x_ve)) / (r_i * B)
      + (sum of 4 * (r_i - 1) / r_i * w) / (N * B)

  where x_ve are the bytes that the option of v adds on edge e to gather or scatter the tensor among
  shards. Both ends of an edge pay: the activation passes once and its gradient once. The last term
  is the exchange of gradients, once for the batch.
- The cost is the largest time per sample of a stage.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import numpy as np

from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.formulations.prices.collectives import link_seconds, ring_part
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import format_bytes
from stagewright.graphs.importers.piper import PiperConfiguration, PiperWorkload


@dataclass(frozen=True, slots=True)
class LayerOption:
    """A way to run a layer on some shards, with the time and memory of each shard.

    Attributes
    ----------
    seconds
        Forward and backward of a sample, p.
    parameter_bytes
        Whose gradients the replicas exchange, w.
    flight_bytes, fixed_bytes
        For every sample in flight, a, and besides, b.
    edge_bytes
        By the number of an edge of the layer: bytes added to a tensor that crosses stages, x.
    """

    name: str
    seconds: float
    parameter_bytes: float
    flight_bytes: float
    fixed_bytes: float
    edge_bytes: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class PiperLayer:
    """A layer and its options by the number of shards."""

    name: str
    options: Mapping[int, tuple[LayerOption, ...]]


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor of ``bytes`` per sample that layer ``target`` reads from layer ``source``."""

    source: int
    target: int
    bytes: float


@dataclass(frozen=True, slots=True)
class PiperStage:
    """Layers, ascending, and the number of each one's option for that many shards."""

    layers: tuple[int, ...]
    replicas: int
    shards: int
    options: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PiperProblem:
    """Divide layers into the stages of a pipeline; minimise the largest time per sample.

    ``memory`` in bytes of a device, ``bandwidth`` in bytes per second of each device to the
    outside, ``samples`` in a batch.
    """

    layers: tuple[PiperLayer, ...]
    edges: tuple[Edge, ...]
    devices: int
    memory: float
    bandwidth: float
    samples: int

    def __post_init__(self) -> None:
        for name in ("devices", "samples"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.bandwidth < np.inf:
            raise InputError(f"bandwidth must be positive and finite, got {self.bandwidth}")
        if not self.memory >= 0:
            raise InputError(f"memory must not be negative, got {self.memory}")
        if not self.layers:
            raise InputError("there must be a layer")
        self._require_graph()
        for v in range(len(self.layers)):
            self._require_options(v)

    def _require_graph(self) -> None:
        n = len(self.layers)
        for e, edge in enumerate(self.edges):
            if not (0 <= edge.source < n and 0 <= edge.target < n):
                raise InputError(f"edge {e} must be between layers below {n}: {edge}")
            if not 0 <= edge.bytes < np.inf:
                raise InputError(f"edge {e}: bytes must be finite and not negative")
        graph = nx.DiGraph((edge.source, edge.target) for edge in self.edges)
        if not nx.is_directed_acyclic_graph(graph):
            cycle = " -> ".join(self.layers[a].name for a, _ in nx.find_cycle(graph))
            raise InputError(f"the layers form a cycle: {cycle}")

    def _require_options(self, v: int) -> None:
        layer = self.layers[v]
        if not any(layer.options.values()):
            raise InputError(f"layer {layer.name} has no option")
        if any(shards < 1 for shards in layer.options):
            raise InputError(f"layer {layer.name}: a number of shards must be at least 1")
        for option in (option for its in layer.options.values() for option in its):
            amounts = (option.seconds, option.parameter_bytes, option.flight_bytes,
                       option.fixed_bytes, *option.edge_bytes.values())  # fmt: skip
            if not all(0 <= amount < np.inf for amount in amounts):
                raise InputError(
                    f"layer {layer.name}, option {option.name}: amounts must be finite and "
                    "not negative"
                )
            if not option.edge_bytes.keys() <= set(self.edges_of[v]):
                raise InputError(
                    f"layer {layer.name}, option {option.name}: edge_bytes must be of the edges "
                    f"{list(self.edges_of[v])}, got {sorted(option.edge_bytes)}"
                )

    @cached_property
    def edges_of(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the edges from and to each layer."""
        own: list[list[int]] = [[] for _ in self.layers]
        for e, edge in enumerate(self.edges):
            own[edge.source].append(e)
            own[edge.target].append(e)
        return tuple(map(tuple, own))

    def option_seconds(
        self, v: int, option: LayerOption, inside: AbstractSet[int], replicas: int
    ) -> float:
        """Seconds that layer ``v`` adds to the time per sample of a stage of layers ``inside``."""
        crossing = 0.0
        for e in self.edges_of[v]:
            edge = self.edges[e]
            if not (edge.source in inside and edge.target in inside):
                crossing += 2 * (edge.bytes + option.edge_bytes.get(e, 0.0))
        exchanged = 4 * ring_part(replicas, option.parameter_bytes)
        sent = crossing / replicas + exchanged / self.samples
        return option.seconds / replicas + link_seconds(sent, self.bandwidth)

    def stage_seconds(self, stage: PiperStage) -> float:
        """The time per sample of a stage."""
        inside = frozenset(stage.layers)
        return sum(
            self.option_seconds(v, option, inside, stage.replicas)
            for v, option in self._chosen(stage)
        )

    def stage_bytes(self, stage: PiperStage, in_flight: int) -> float:
        """The bytes on each device of a stage with that many samples in flight."""
        return sum(
            option.flight_bytes * in_flight + option.fixed_bytes
            for _, option in self._chosen(stage)
        )

    def _chosen(self, stage: PiperStage) -> list[tuple[int, LayerOption]]:
        return [
            (v, self.layers[v].options[stage.shards][option])
            for v, option in zip(stage.layers, stage.options, strict=True)
        ]

    def evaluate(self, stages: Sequence[PiperStage]) -> float:
        """Check every rule; the largest time per sample of a stage, in seconds.

        Raises InvalidPlan if a rule is broken; the message names the first one.
        """
        self._require_layers(stages)
        self._require_degrees(stages)
        self._require_memory(stages)
        return max(self.stage_seconds(stage) for stage in stages)

    def _require_layers(self, stages: Sequence[PiperStage]) -> None:
        """Each layer once, and no edge that goes back."""
        home: dict[int, int] = {}
        for i, stage in enumerate(stages):
            self._require_options_of(i, stage)
            for v in stage.layers:
                if v in home:
                    raise InvalidPlan(f"{self.layers[v].name} is in two stages, or twice in one")
                home[v] = i
        for v, layer in enumerate(self.layers):
            if v not in home:
                raise InvalidPlan(f"{layer.name} is in no stage")
        for edge in self.edges:
            if home[edge.source] > home[edge.target]:
                names = f"{self.layers[edge.source].name} to {self.layers[edge.target].name}"
                raise InvalidPlan(f"the edge from {names} goes back")

    def _require_options_of(self, i: int, stage: PiperStage) -> None:
        if not stage.layers or len(stage.layers) != len(stage.options):
            raise InvalidPlan(f"stage {i} must have layers, and an option for each")
        for v, option in zip(stage.layers, stage.options, strict=True):
            if not 0 <= v < len(self.layers):
                raise InvalidPlan(f"stage {i}: there is no layer {v}")
            layer = self.layers[v]
            if not 0 <= option < len(layer.options.get(stage.shards, ())):
                raise InvalidPlan(
                    f"stage {i}: {layer.name} has no option {option} for {stage.shards} shards"
                )

    def _require_degrees(self, stages: Sequence[PiperStage]) -> None:
        for i, stage in enumerate(stages):
            if stage.replicas < 1 or self.samples % stage.replicas:
                raise InvalidPlan(
                    f"stage {i}: {stage.replicas} replicas do not divide {self.samples} samples"
                )
        if (replicas := sum(stage.replicas for stage in stages)) > self.samples:
            raise InvalidPlan(f"{replicas} replicas in all for {self.samples} samples")
        if (used := sum(stage.replicas * stage.shards for stage in stages)) > self.devices:
            raise InvalidPlan(f"{used} devices are used, there are {self.devices}")

    def _require_memory(self, stages: Sequence[PiperStage]) -> None:
        for i, (stage, count) in enumerate(zip(stages, in_flight(stages), strict=True)):
            held = self.stage_bytes(stage, count)
            if held > self.memory * (1 + RELATIVE_TOLERANCE):
                raise InvalidPlan(
                    f"stage {i}: {format_bytes(held)} with {count} samples in flight on a "
                    f"device of {format_bytes(self.memory)}"
                )


def in_flight(stages: Sequence[PiperStage]) -> list[int]:
    """The samples in flight on a replica of each stage."""
    later = np.cumsum([stage.replicas for stage in stages[::-1]])[::-1].tolist()
    return [-(-rest // stage.replicas) for rest, stage in zip(later, stages, strict=True)]


def device_seconds(layer: PiperLayer) -> float:
    """The least shards times seconds of a sample of a layer."""
    return min(t * one.seconds for t, its in layer.options.items() for one in its)


def least_seconds(layer: PiperLayer) -> float:
    """The least seconds of a sample of a layer."""
    return min(one.seconds for its in layer.options.values() for one in its)


def shared_work(problem: PiperProblem) -> float:
    """A lower bound on the time per sample: the least device-seconds of a sample per device.

    A stage of r replicas on t shards takes r * t devices for at least the sum of its p / r, so
    that the p * t of all layers add up to at most the devices times the cost.
    """
    return sum(map(device_seconds, problem.layers)) / problem.devices


def piper_problem(
    workload: PiperWorkload,
    *,
    devices: int | None = None,
    memory: float | None = None,
    bandwidth: float | None = None,
    samples: int | None = None,
) -> PiperProblem:
    """The problem of a published workload; arguments that are not given are as in the file."""
    number = {node.id: v for v, node in enumerate(workload.nodes)}
    edge_of = {(one.source_id, one.dest_id): e for e, one in enumerate(workload.edges)}
    labels = workload.labels()

    def option(id_: int, one: PiperConfiguration) -> LayerOption:
        entering = {edge_of[source, id_]: size for source, size in one.sync_time_fw.items()}
        leaving = {edge_of[id_, target]: size for target, size in one.sync_time_bw.items()}
        return LayerOption(
            name=one.id,
            seconds=one.time_per_sample,
            parameter_bytes=one.parameter_size,
            flight_bytes=one.memory_usage_a,
            fixed_bytes=one.memory_usage_b,
            edge_bytes=entering | leaving,
        )

    return PiperProblem(
        layers=tuple(
            PiperLayer(
                labels[node.id],
                {
                    shards: tuple(option(node.id, one) for one in its)
                    for shards, its in node.configurations.items()
                },
            )
            for node in workload.nodes
        ),
        edges=tuple(
            Edge(number[one.source_id], number[one.dest_id], one.communication_cost)
            for one in workload.edges
        ),
        devices=workload.max_devices if devices is None else devices,
        memory=workload.max_memory_per_device if memory is None else memory,
        bandwidth=workload.bandwidth if bandwidth is None else bandwidth,
        samples=workload.samples_in_batch if samples is None else samples,
    )
