"""Learned costs of operators and transfers: FastT's cost models (Middleware 2020, section 4).

Computation is known by operator and kind of device, as the mean of what was measured; transfers by
pair of devices, as a line fitted to size and time. Nothing else is known: a plan explores the rest.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import numpy as np
from pydantic import ConfigDict

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MIN_BANDWIDTH, require_amount, require_count
from stagewright.graphs.machines.cluster import Cluster, Link, from_matrix
from stagewright.graphs.models.operators.step_graph import (
    WITHOUT_TIME,
    DividedTimes,
    Node,
    Split,
    StepGraph,
)

_MOST_MEASURED = 10**12


@documents.record
class Computed:
    """The mean of ``count`` measurements of an operator on a kind of device, in seconds."""

    operator: str
    kind: str
    count: int
    seconds: float

    def __post_init__(self) -> None:
        require_count(self.count, f"operator {self.operator!r}: count", _MOST_MEASURED)
        require_amount(self.seconds, f"operator {self.operator!r}: seconds")
        whole, *of_part = self.operator.split("/")
        if of_part and not (len(of_part) == 3 and of_part[1].isdecimal()):
            raise InputError(
                f"operator {self.operator!r}: parts are named OPERATOR/DIMENSION/PARTS/PART, "
                f"for example {part_known_as(whole, 'batch', 2, 'part')!r}"
            )


@documents.record
class Sent:
    """Sums over ``count`` measured transfers from ``source`` to ``target``: bytes, seconds."""

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
        require_count(self.count, f"{place}: count", _MOST_MEASURED)
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
    """Times of operators and transfers that were measured in a run of a plan.

    ``operators``: operator, device and seconds. ``transfers``: source, target, bytes and seconds.
    ``count``: the number of steps in which each was measured.
    """

    operators: tuple[tuple[str, str, float], ...]
    transfers: tuple[tuple[str, str, float, float], ...]
    count: int

    def __post_init__(self) -> None:
        require_count(self.count, "count", _MOST_MEASURED)
        for name, device, seconds in self.operators:
            require_amount(seconds, f"operator {name!r} on {device!r}: seconds")
        for source, target, size, seconds in self.transfers:
            require_amount(size, f"transfer from {source!r} to {target!r}: bytes")
            require_amount(seconds, f"transfer from {source!r} to {target!r}: seconds")


@dataclass(frozen=True, slots=True)
class Drift:
    """Distance of an observation from the costs that were known before.

    ``operators``, ``links``: the sum of the differences over the sum of what was known: of the
    operators, and of what each pair's transfers took together. A difference from 0 is infinite.
    ``learned``: the operators on kinds of devices, and the pairs, that were not known before.
    """

    operators: float
    links: float
    learned: int

    def is_stable(self, tolerance: float) -> bool:
        """Whether nothing was learned and the known costs were right up to ``tolerance``."""
        return not self.learned and max(self.operators, self.links) <= tolerance


@dataclass(frozen=True)
class CostBook:
    """Measured times of a graph's operators and of a cluster's links."""

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    computed: tuple[Computed, ...] = ()
    sent: tuple[Sent, ...] = ()
    format: Literal["stagewright-costs"] = "stagewright-costs"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        _require_unique("operator on kind", ((one.operator, one.kind) for one in self.computed))
        _require_unique("transfers from and to", ((one.source, one.target) for one in self.sent))

    def updated(self, seen: Observation, cluster: Cluster) -> tuple["CostBook", Drift]:
        """The book with one more observation, and how far that is from the book.

        Replicas of an operator (``NAME@2``) are the same operator. Raises InputError if a device is
        not one of ``cluster``.
        """
        operators = [
            ((known_as(name), cluster.devices[_position(device, cluster)].kind), seconds)
            for name, device, seconds in seen.operators
        ]
        pairs: dict[tuple[str, str], Sent] = {}
        for source, target, size, seconds in seen.transfers:
            new = Sent(source, target, 1, size, seconds, size * size, size * seconds)
            _pair(new, cluster)
            old = pairs.get((source, target))
            pairs[source, target] = new if old is None else old.plus(new)
        computed = {(one.operator, one.kind): one for one in self.computed}
        sent = {(one.source, one.target): one for one in self.sent}
        drift = Drift(
            _difference([(computed[key].seconds, s) for key, s in operators if key in computed]),
            _difference(
                [
                    (_seconds(sent[key], one, cluster), one.seconds)
                    for key, one in pairs.items()
                    if key in sent
                ]
            ),
            len({key for key, _ in operators} - computed.keys()) + len(pairs.keys() - sent.keys()),
        )
        for key, seconds in operators:
            one = computed.get(key, Computed(*key, seen.count, seconds))
            count = seen.count + (one.count if key in computed else 0)
            mean = one.seconds + (seconds - one.seconds) * seen.count / count
            computed[key] = Computed(*key, count, mean)
        for key, new in pairs.items():
            sent[key] = sent[key].plus(new) if key in sent else new
        return CostBook(tuple(computed.values()), tuple(sent.values())), drift

    def priced(self, graph: StepGraph, cluster: Cluster) -> tuple[StepGraph, Cluster]:
        """``graph`` and ``cluster`` with the known costs; operators without costs have no time.

        The graph's ``source`` says how many these are on every kind of device. Pairs that were not
        measured keep the links of ``cluster``. Raises InputError if transfers were measured between
        devices that are not of ``cluster``.
        """
        known = {(one.operator, one.kind): one.seconds for one in self.computed}
        counts = _divisions(one.operator for one in self.computed)
        kinds = sorted({device.kind for device in cluster.devices})

        def times(name: str) -> dict[str, float]:
            return {kind: known[name, kind] for kind in kinds if (name, kind) in known}

        def timed(node: Node) -> Node:
            name = known_as(node.name)
            splits = tuple(
                replace(split, measured=_divided(name, split, counts.get(name, ()), times))
                for split in node.splits
            )
            return replace(node, seconds=times(name), splits=splits)

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


def part_known_as(operator: str, dimension: str, parts: int, part: str) -> str:
    """The name in the book of a part, cut or join: ``conv/batch/2/part``, ``conv/batch/2/cut0``.

    All parts of an operator are one: they are equal.
    """
    return f"{operator}/{dimension}/{parts}/{'part' if part.isdigit() else part}"


def _divisions(operators: Iterable[str]) -> dict[str, set[int]]:
    """The numbers of parts into which operators have been divided."""
    found: dict[str, set[int]] = {}
    for one in operators:
        if "/" in one:
            whole, _, parts, _ = one.split("/")
            found.setdefault(whole, set()).add(int(parts))
    return found


def _divided(
    name: str, split: Split, counts: Iterable[int], times: Callable[[str], dict[str, float]]
) -> tuple[DividedTimes, ...]:
    """The measured times of an operator that is divided along the dimension of ``split``."""
    found = []
    for parts in sorted(counts):
        known = partial(part_known_as, name, split.dimension, parts)
        if part := times(known("part")):
            cuts = tuple(times(known(f"cut{k}")) for k in range(len(split.inputs)))
            joins = tuple(times(known(f"join{k}")) for k in range(len(split.outputs)))
            found.append(DividedTimes(parts, part, cuts, joins))
    return tuple(found)


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


def _seconds(known: Sent, seen: Sent, cluster: Cluster) -> float:
    """Seconds of all transfers of ``seen``, by the fitted line of ``known``."""
    pair = _pair(known, cluster)
    link = known.line(Link(float(cluster.bandwidth[pair]), float(cluster.latency[pair])))
    return seen.count * link.latency_seconds + seen.bytes / link.bandwidth_bytes_per_second


def _difference(rows: Sequence[tuple[float, float]]) -> float:
    """Sum of |seen - known| over rows (known, seen), divided by the sum of the known values."""
    total = sum(known for known, _ in rows)
    difference = sum(abs(seen - known) for known, seen in rows)
    if not total:
        return math.inf if difference else 0.0
    return difference / total
