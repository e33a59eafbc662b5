"""Learned costs of operators and transfers: FastT's cost models (Middleware 2020, section 4).

Computation is known by operator and kind of device, as the mean of what was measured; transfers by
pair of devices, as a line fitted to size and time. Nothing else is known: a plan explores the rest.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import ConfigDict

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MIN_BANDWIDTH, require_amount, require_count
from stagewright.graphs.machines.cluster import Cluster, Link, from_matrix
from stagewright.graphs.models.step_graph import WITHOUT_TIME, Node, StepGraph

FORMAT: Literal["stagewright-costs"] = "stagewright-costs"
VERSION: Literal[1] = 1
MOST_MEASURED = 10**12


@dataclass(frozen=True, slots=True)
class Computed:
    """The mean of ``count`` measurements of an operator on a kind of device, in seconds."""

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    operator: str
    kind: str
    count: int
    seconds: float

    def __post_init__(self) -> None:
        require_count(self.count, f"operator {self.operator!r}: count", MOST_MEASURED)
        require_amount(self.seconds, f"operator {self.operator!r}: seconds")


@dataclass(frozen=True, slots=True)
class Sent:
    """Sums over ``count`` measured transfers from ``source`` to ``target``: bytes, seconds."""

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    source: str
    target: str
    count: int
    bytes: float
    seconds: float
    bytes_squared: float
    bytes_seconds: float

    def __post_init__(self) -> None:
        place = f"transfers from {self.source!r} to {self.target!r}"
        if self.source == self.target:
            raise InputError(f"{place}: they are between two devices")
        require_count(self.count, f"{place}: count", MOST_MEASURED)
        for name in ("bytes", "seconds", "bytes_squared", "bytes_seconds"):
            require_amount(getattr(self, name), f"{place}: {name}")

    def plus(self, other: "Sent") -> "Sent":
        """The sums over the transfers of both."""
        return replace(
            self,
            count=self.count + other.count,
            bytes=self.bytes + other.bytes,
            seconds=self.seconds + other.seconds,
            bytes_squared=self.bytes_squared + other.bytes_squared,
            bytes_seconds=self.bytes_seconds + other.bytes_seconds,
        )

    def line(self, given: Link) -> Link:
        """The link whose latency + size / bandwidth has the least squares to the measurements.

        Of links that a cluster may have: no negative latency, at least ``MIN_BANDWIDTH``. If sizes
        do not tell the bandwidth (all are equal, or larger ones took no longer), it is that of
        ``given``, and the latency the rest of the mean time.
        """
        n, x, y, xx, xy = (
            self.count, self.bytes, self.seconds, self.bytes_squared, self.bytes_seconds,
        )  # fmt: skip
        spread = n * xx - x * x
        slope = (n * xy - x * y) / spread if spread > 1e-9 * n * xx else 0.0
        if slope <= 0:
            left = (y - x / given.bandwidth_bytes_per_second) / n
            return replace(given, latency_seconds=max(0.0, left))
        if slope * x > y:
            slope = xy / xx  # the best line without latency
        bandwidth = max(1 / slope, MIN_BANDWIDTH)
        return Link(bandwidth, max(0.0, (y - x / bandwidth) / n))


@dataclass(frozen=True, slots=True)
class Observation:
    """What a run of a plan showed.

    Attributes
    ----------
    operators
        Operator, device and seconds.
    transfers
        Source, target, bytes and seconds.
    count
        The number of steps in which each was measured.
    """

    operators: tuple[tuple[str, str, float], ...]
    transfers: tuple[tuple[str, str, float, float], ...]
    count: int

    def __post_init__(self) -> None:
        require_count(self.count, "count", MOST_MEASURED)
        for name, device, seconds in self.operators:
            require_amount(seconds, f"operator {name!r} on {device!r}: seconds")
        for source, target, size, seconds in self.transfers:
            require_amount(size, f"transfer from {source!r} to {target!r}: bytes")
            require_amount(seconds, f"transfer from {source!r} to {target!r}: seconds")


@dataclass(frozen=True, slots=True)
class Drift:
    """How much a book changed by an observation.

    Attributes
    ----------
    operators, links
        The sum of the changes of the means over their sum, of what was known before: of operators,
        and of pairs' transfers of their mean size. A change from 0 is infinite.
    learned
        The operators on kinds of devices, and the pairs, that were not known before.
    """

    operators: float
    links: float
    learned: int

    def is_stable(self, tolerance: float) -> bool:
        """Whether nothing was learned and nothing known changed by more than ``tolerance``."""
        return not self.learned and max(self.operators, self.links) <= tolerance


@dataclass(frozen=True)
class CostBook:
    """What has been measured of a graph's operators and a cluster's links."""

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    computed: tuple[Computed, ...] = ()
    sent: tuple[Sent, ...] = ()
    format: Literal["stagewright-costs"] = FORMAT
    version: Literal[1] = VERSION

    def __post_init__(self) -> None:
        _require_unique("operator on kind", ((one.operator, one.kind) for one in self.computed))
        _require_unique("transfers from and to", ((one.source, one.target) for one in self.sent))

    def updated(self, seen: Observation, cluster: Cluster) -> tuple["CostBook", Drift]:
        """The book with one more observation, and how much that changed it.

        Replicas of an operator (``NAME@2``) are the same operator.

        Raises
        ------
        InputError
            If a device is not one of ``cluster``.
        """
        computed = {(one.operator, one.kind): one for one in self.computed}
        for name, device, seconds in seen.operators:
            key = known_as(name), cluster.devices[_position(device, cluster)].kind
            old = computed.get(key)
            count = seen.count + (0 if old is None else old.count)
            before = seconds if old is None else old.seconds
            mean = before + (seconds - before) * seen.count / count
            computed[key] = Computed(*key, count, mean)
        sent = {(one.source, one.target): one for one in self.sent}
        for source, target, size, seconds in seen.transfers:
            new = Sent(source, target, 1, size, seconds, size * size, size * seconds)
            before_it = sent.get((source, target))
            sent[source, target] = new if before_it is None else before_it.plus(new)
        book = CostBook(tuple(computed.values()), tuple(sent.values()))
        return book, book._drift(self, cluster)

    def _drift(self, before: "CostBook", cluster: Cluster) -> Drift:
        own = {(one.operator, one.kind): one.seconds for one in self.computed}
        old = {(one.operator, one.kind): one.seconds for one in before.computed}
        pairs = {(one.source, one.target): one for one in self.sent}
        old_pairs = {(one.source, one.target): one for one in before.sent}
        mean = {key: one.bytes / one.count for key, one in pairs.items()}
        here = {key: _seconds(one, mean[key], cluster) for key, one in pairs.items()}
        there = {key: _seconds(one, mean[key], cluster) for key, one in old_pairs.items()}
        learned = len(own) - len(old) + len(here) - len(there)
        return Drift(_change(old, own), _change(there, here), learned)

    def priced(self, graph: StepGraph, cluster: Cluster) -> tuple[StepGraph, Cluster]:
        """``graph`` and ``cluster`` with what is known; other operators have no time.

        The graph's ``source`` says how many these are on every kind of device.
        Pairs that were not measured keep the links of ``cluster``.

        Raises
        ------
        InputError
            If transfers were measured between devices that are not of ``cluster``.
        """
        known = {(one.operator, one.kind): one.seconds for one in self.computed}
        kinds = sorted({device.kind for device in cluster.devices})

        def timed(node: Node) -> Node:
            own = {kind: known.get((known_as(node.name), kind)) for kind in kinds}
            return replace(node, seconds={k: s for k, s in own.items() if s is not None})

        nodes = tuple(
            replace(node, seconds={}) if node.role in WITHOUT_TIME else timed(node)
            for node in graph.nodes
        )
        priced = replace(graph, nodes=nodes, source=_source(nodes, kinds))
        return priced, self._linked(cluster)

    def _linked(self, cluster: Cluster) -> Cluster:
        if not self.sent:
            return cluster
        bandwidth, latency = cluster.bandwidth.copy(), cluster.latency.copy()
        for one in self.sent:
            pair = _pair(one, cluster)
            link = one.line(Link(float(bandwidth[pair]), float(latency[pair])))
            bandwidth[pair] = link.bandwidth_bytes_per_second
            latency[pair] = link.latency_seconds
        np.fill_diagonal(bandwidth, 0.0)
        return from_matrix(
            cluster.devices,
            bandwidth,
            latency.tolist(),
            servers=[[cluster.devices[i].name for i in server] for server in cluster.servers],
            name=cluster.name,
        )


def known_as(name: str) -> str:
    """The operator of which ``name`` is a replica: ``conv@2`` of ``conv``, its parts likewise."""
    whole, slash, part = name.partition("/")
    base, _, replica = whole.rpartition("@")
    return f"{base if replica.isdigit() else whole}{slash}{part}"


def _source(nodes: Sequence[Node], kinds: Sequence[str]) -> str:
    computed = [node for node in nodes if node.role not in WITHOUT_TIME]
    unknown = (
        f"{sum(kind not in node.seconds for node in computed)} of {len(computed)} on {kind}"
        for kind in kinds
    )
    return f"learned; operators not measured: {', '.join(unknown)}"


def _require_unique(what: str, keys: Iterable[tuple[str, str]]) -> None:
    known = set[tuple[str, str]]()
    for key in keys:
        if key in known:
            raise InputError(f"{what} {key[0]!r}, {key[1]!r} is listed twice")
        known.add(key)


def _position(device: str, cluster: Cluster) -> int:
    if device not in cluster.index:
        raise InputError(f"{device!r} was measured, which is no device of {cluster.name!r}")
    return cluster.index[device]


def _pair(one: Sent, cluster: Cluster) -> tuple[int, int]:
    return _position(one.source, cluster), _position(one.target, cluster)


def _seconds(one: Sent, size: float, cluster: Cluster) -> float:
    pair = _pair(one, cluster)
    link = one.line(Link(float(cluster.bandwidth[pair]), float(cluster.latency[pair])))
    return link.latency_seconds + size / link.bandwidth_bytes_per_second


def _change(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]) -> float:
    """The sum of the changes of what was known before, over its sum."""
    total = sum(before.values())
    change = sum(abs(after[key] - seconds) for key, seconds in before.items())
    if not total:
        return math.inf if change else 0.0
    return change / total


def load_costs(path: str | os.PathLike[str]) -> CostBook:
    """Read a book; raises InputError, with one line, if it is not valid."""
    return documents.read(CostBook, path, FORMAT, VERSION)


def save_costs(book: CostBook, path: str | os.PathLike[str]) -> None:
    """Write a book atomically."""
    documents.write(CostBook, book, path)
