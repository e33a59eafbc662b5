"""Throughput-optimal partition of an operator graph (Tarnawski et al., NeurIPS 2020).

The rules:

- Every part, of one or several operators that must be together, is in exactly one set; a device
  has at most one set. A set may be on several devices of a pool, its replicas.
- The sets are contiguous: there is an order of them in which no edge goes back. A pipeline runs
  through them in that order, and the backward of a part is where its forward is.
- The load of a set is the time of its parts on its device and, on devices that pay for transfers,
  the time of every tensor of which some but not all parts are in the set: its maker sends it once,
  and each other set that reads it receives it once.
- The replicas of a set do equal shares of the samples, and exchange their gradients: the load is
  that of one device divided by r, and 2 (r - 1) / r times the exchange of the set's parts.
- The parts of a set fit in the memory of each of its devices.
- The cost is the largest load: the time between two samples that leave the full pipeline. If a
  pipeline does all forwards before the first backward, it is the largest forward load plus the
  largest backward load.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx
import numpy as np

from stagewright.formulations.dags.latency import LatencyProblem
from stagewright.formulations.dags.piper import PiperProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.formulations.prices.collectives import ring_part
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import format_bytes


@dataclass(frozen=True, slots=True)
class DevicePool:
    """Equal devices: their number, the bytes of each, and whether transfers take their time."""

    name: str
    count: int
    memory: float
    pays_transfers: bool = True


@dataclass(frozen=True, slots=True)
class Tensor:
    """The output of a part that other parts read; ``seconds`` to send or to receive the output.

    ``backward``: in the backward pass.
    """

    parts: tuple[int, ...]
    seconds: float
    backward: bool = False


@dataclass(frozen=True, eq=False)
class DagProblem:
    """Divide n parts among the devices of some pools; minimise the largest load.

    Attributes
    ----------
    names
        Of the parts.
    edges
        (a, b): the set of part a is not after that of part b; acyclic.
    seconds
        Time of each part on a device of each pool, shape (n, pools).
    bytes
        Of each part, shape (n,).
    backward
        Of ``seconds`` those of the backward pass, the same shape; None: nothing.
    exchange
        Seconds in which a device sends the gradients of each part, shape (n,); None: nothing.
    most_replicas
        Of a set.
    """

    names: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]
    seconds: Floats
    bytes: Floats
    tensors: tuple[Tensor, ...]
    pools: tuple[DevicePool, ...]
    backward: Floats | None = None
    exchange: Floats | None = None
    most_replicas: int = 1

    def __post_init__(self) -> None:
        n, pools = len(self.names), len(self.pools)
        if not n or not any(pool.count for pool in self.pools):
            raise InputError("there must be a part and a device")
        if self.most_replicas < 1:
            raise InputError(f"a set has 1 replica or more, got {self.most_replicas}")
        shapes = {"seconds": (n, pools), "bytes": (n,)}
        optional = {"backward": (n, pools), "exchange": (n,)}
        shapes |= {k: shape for k, shape in optional.items() if getattr(self, k) is not None}
        for name, shape in shapes.items():
            values = getattr(self, name)
            if values.shape != shape:
                raise InputError(f"{name} must have the shape {shape}, got {values.shape}")
            if not (sum(values.ravel().tolist()) < np.inf and (values >= 0).all()):
                raise InputError(f"{name} must be finite and not negative, also in sum")
        if self.backward is not None and (self.backward > self.seconds).any():
            raise InputError("the backward pass is a part of the seconds, at most all of them")
        self._require_graph()

    def _require_graph(self) -> None:
        n = len(self.names)
        for parts in (*self.edges, *(tensor.parts for tensor in self.tensors)):
            if not all(0 <= part < n for part in parts) or len(set(parts)) < len(parts):
                raise InputError(f"edges and tensors must be of different parts below {n}: {parts}")
        sent = [tensor.seconds for tensor in self.tensors]
        if not (sum(sent) < np.inf and all(seconds >= 0 for seconds in sent)):
            raise InputError("a tensor's seconds must be finite and not negative, also in sum")
        graph = nx.DiGraph(self.edges)
        if not nx.is_directed_acyclic_graph(graph):
            cycle = " -> ".join(self.names[a] for a, _ in nx.find_cycle(graph))
            raise InputError(f"the parts form a cycle: {cycle}")

    def load(self, parts: Sequence[int], pool: int, replicas: int = 1) -> float:
        """The load of a set of ``parts`` on a device of a pool, in seconds."""
        own = set(parts)
        total = float(sum(self.seconds[part, pool] for part in own))
        if self.pools[pool].pays_transfers:
            total += sum(
                one.seconds
                for one in self.tensors
                if 0 < len(own & set(one.parts)) < len(one.parts)
            )
        exchanged = 0.0 if self.exchange is None else sum(self.exchange[part] for part in own)
        return total / replicas + 2 * ring_part(replicas, float(exchanged))

    @cached_property
    def of_backward(self) -> "DagProblem":
        """The same with the times of the backward pass alone."""
        return replace(
            self,
            seconds=np.zeros_like(self.seconds) if self.backward is None else self.backward,
            tensors=tuple(one for one in self.tensors if one.backward),
            backward=None,
        )

    @cached_property
    def of_forward(self) -> "DagProblem":
        """The same with the times of the forward pass alone; no gradients are exchanged."""
        return replace(
            self,
            seconds=self.seconds - (0.0 if self.backward is None else self.backward),
            tensors=tuple(one for one in self.tensors if not one.backward),
            backward=None,
            exchange=None,
        )

    def evaluate_phases(self, sets: "Sequence[PlacedSet]") -> float:
        """Check every rule; the largest forward load plus the largest backward load, in seconds.

        Raises InvalidPlan as `evaluate`.
        """
        return self.of_forward.evaluate(sets) + self.of_backward.evaluate(sets)

    def evaluate(self, sets: "Sequence[PlacedSet]", contiguous: bool = True) -> float:
        """Check every rule, contiguity only if asked for; the largest load, in seconds.

        Raises InvalidPlan if a rule is broken; the message names the first one.
        """
        home: dict[int, int] = {}
        for number, one in enumerate(sets):
            for part in one.parts:
                if home.setdefault(part, number) != number:
                    raise InvalidPlan(f"{self.names[part]} is in two sets")
        if home.keys() != set(range(len(self.names))):
            missing = next(i for i in range(len(self.names)) if i not in home)
            raise InvalidPlan(f"{self.names[missing]} is in no set")
        self._require_devices(sets)
        if contiguous:
            self._require_contiguous(home)
        return max(self.load(one.parts, one.pool, one.replicas) for one in sets)

    def _require_contiguous(self, home: dict[int, int]) -> None:
        quotient = nx.DiGraph((home[a], home[b]) for a, b in self.edges if home[a] != home[b])
        if not nx.is_directed_acyclic_graph(quotient):
            cycle = nx.find_cycle(quotient)
            raise InvalidPlan(f"sets {cycle[0][0]} and {cycle[0][1]} are not contiguous")

    def _require_devices(self, sets: "Sequence[PlacedSet]") -> None:
        used = [0] * len(self.pools)
        for number, one in enumerate(sets):
            if not 0 <= one.pool < len(self.pools):
                raise InvalidPlan(f"set {number}: there is no pool {one.pool}")
            pool = self.pools[one.pool]
            if not 1 <= one.replicas <= self.most_replicas:
                raise InvalidPlan(
                    f"set {number}: {one.replicas} replicas, a set has 1 to {self.most_replicas}"
                )
            used[one.pool] += one.replicas
            if used[one.pool] > pool.count:
                raise InvalidPlan(f"there are only {pool.count} devices {pool.name}")
            held = float(sum(self.bytes[part] for part in one.parts))
            if held > pool.memory * (1 + RELATIVE_TOLERANCE):
                raise InvalidPlan(
                    f"set {number}: {format_bytes(held)} on a device {pool.name} of "
                    f"{format_bytes(pool.memory)}"
                )


@dataclass(frozen=True, slots=True)
class PlacedSet:
    """The parts on one device of a pool, ascending; or on several, its replicas."""

    pool: int
    parts: tuple[int, ...]
    replicas: int = 1


def priced_load(problem: DagProblem, prices: Floats) -> float:
    """The least price of all work, divided by the price of a second of all devices.

    ``prices`` of a second on a device of each pool, not negative. With a largest load of T seconds
    at most T times the price of all devices is spent, and each part costs at least its cheapest
    pool.
    """
    paid = np.maximum(0.0, prices)
    counts = np.array([pool.count for pool in problem.pools], dtype=float)
    used = counts > 0
    if not (total := float(paid @ counts)):
        return 0.0
    return float((problem.seconds * paid)[:, used].min(axis=1).sum()) / total


def heaviest_part(problem: DagProblem) -> float:
    """The longest time of a part on its fastest device, on the number of replicas that suits it."""
    used = [k for k, pool in enumerate(problem.pools) if pool.count]
    fastest = problem.seconds[:, used].min(axis=1)
    exchange = np.zeros_like(fastest) if problem.exchange is None else problem.exchange
    replicas = np.arange(1, problem.most_replicas + 1)[:, None]
    loads = fastest / replicas + 2 * ring_part(replicas, exchange)
    return float(loads.min(axis=0).max())


def part_shortage(problem: DagProblem) -> str | None:
    """The part that fits nowhere, or the devices that all parts need; None without either."""
    pools = [pool for pool in problem.pools if pool.count]
    largest = max(pool.memory for pool in pools)
    heaviest = int(problem.bytes.argmax())
    needed = float(problem.bytes[heaviest])
    if _is_more(needed, largest):
        return (
            f"{problem.names[heaviest]} and what must be with it have {format_bytes(needed)}, the "
            f"largest device has {format_bytes(largest)}"
        )
    total, room = float(problem.bytes.sum()), sum(pool.count * pool.memory for pool in pools)
    if _is_more(total, room):
        count = sum(pool.count for pool in pools)
        return (
            f"all parts have {format_bytes(total)}, the devices {format_bytes(room)}: "
            f"{math.ceil(total / largest)} devices of {format_bytes(largest)} are needed at least, "
            f"not {count}"
        )
    return None


def node_shortage(problem: LatencyProblem) -> str | None:
    """Without hosts: the node, or the memory, that accelerators cannot hold; None without."""
    if problem.hosts:
        return None
    lost = [v for v in range(len(problem.names)) if not problem.supported[v]]
    if lost:
        return f"{problem.names[lost[0]]} does not run on an accelerator, and there are no hosts"
    heaviest = int(problem.bytes.argmax())
    needed, total = float(problem.bytes[heaviest]), float(problem.bytes.sum())
    if _is_more(needed, problem.memory):
        return (
            f"{problem.names[heaviest]} has {format_bytes(needed)}, an accelerator "
            f"{format_bytes(problem.memory)}, and there are no hosts"
        )
    if _is_more(total, problem.accelerators * problem.memory):
        return (
            f"all nodes have {format_bytes(total)}, all accelerators "
            f"{format_bytes(problem.accelerators * problem.memory)}, and there are no hosts"
        )
    return None


def layer_shortage(problem: PiperProblem) -> str | None:
    """The layer that fits nowhere with one sample in flight, or needs more devices, if any."""
    for layer in problem.layers:
        shards = min(t for t, its in layer.options.items() if its)
        if shards > problem.devices:
            return (
                f"layer {layer.name} takes {shards} devices at least, there are {problem.devices}"
            )
        least = min(
            one.flight_bytes + one.fixed_bytes
            for t, its in layer.options.items()
            if t <= problem.devices
            for one in its
        )
        if _is_more(least, problem.memory):
            return (
                f"layer {layer.name} needs {format_bytes(least)} on up to {problem.devices} "
                f"devices, each has {format_bytes(problem.memory)}"
            )
    return None


def _is_more(needed: float, there: float) -> bool:
    return needed > there * (1 + RELATIVE_TOLERANCE)
