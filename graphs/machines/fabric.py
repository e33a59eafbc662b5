"""Clusters of servers, and a large uniform cluster by its levels: servers, racks, all.

A fabric has no list of its devices. Ranks are numbered through the levels: those of a server first,
then those of a rack.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    MAX_DEVICES,
    require_amount,
    require_bandwidth,
    require_count,
)
from stagewright.graphs.machines.cluster import (
    Cluster,
    Device,
    Link,
    MatrixLinks,
    ServerLinks,
    from_matrix,
)
from stagewright.graphs.machines.devices import ACCELERATORS, Accelerator, accelerator

MAX_MATRIX = 1024
"""Devices of a cluster with a matrix of links: it has the square of them as entries."""


@dataclass(frozen=True, slots=True)
class ServerGroup:
    """``servers`` equal servers, each with ``devices``.

    ``intra`` is the link between devices of a server, or the server as a cluster if its links
    differ; ``inter`` the link to devices of other servers. None where there is no such pair.
    """

    devices: tuple[Device, ...]
    servers: int
    intra: Link | Cluster | None
    inter: Link | None


def mixed_servers(groups: Sequence[ServerGroup], name: str, source: str | None = None) -> Cluster:
    """The servers of all groups; a device is named after its server and itself: s0g0, s0g1, ...

    Servers of two groups communicate at the lower bandwidth and the higher latency of both. If the
    groups have the same links the cluster has levels, else a matrix of at most ``MAX_MATRIX``
    devices. Raises InputError if there are too many devices, or a link is missing.
    """
    for one in groups:
        require_count(one.servers, "the number of servers", MAX_DEVICES)
        require_count(len(one.devices), "the number of devices per server", MAX_DEVICES)
    total = sum(one.servers * len(one.devices) for one in groups)
    require_count(total, "the number of devices", MAX_DEVICES)
    of_server = [group for group in groups for _ in range(group.servers)]
    named = [
        [replace(one, name=f"s{s}{one.name}") for one in group.devices]
        for s, group in enumerate(of_server)
    ]
    devices = [one for server in named for one in server]
    servers = tuple(tuple(one.name for one in server) for server in named)
    inside = {one.intra for one in groups if one.intra is not None and len(one.devices) > 1}
    between = {one.inter for one in groups if len(of_server) > 1}
    intra = next(iter(inside), None)
    if len(inside) <= 1 and len(between) <= 1 and not isinstance(intra, Cluster):
        inter = next(iter(between), None)
        alone = groups[0].intra
        intra = intra or inter or (alone if isinstance(alone, Link) else None)
        if intra is None:
            raise InputError(f"cluster {name!r} has no links: give that inside a server")
        return Cluster(name, tuple(devices), ServerLinks(servers, intra, inter), source=source)
    return replace(_with_matrix(name, devices, servers, of_server), source=source)


def repeated(one: Cluster, servers: int, inter: Link | None) -> ServerGroup:
    """``servers`` servers like ``one``, with ``inter`` to devices of other servers.

    Raises InputError if ``one`` is no matrix of links.
    """
    if not isinstance(one.links, MatrixLinks):
        raise InputError(f"cluster {one.name!r} has servers already; one of a matrix is needed")
    alike = with_levels(one).links
    return ServerGroup(
        one.devices, servers, alike.intra if isinstance(alike, ServerLinks) else one, inter
    )


def with_levels(cluster: Cluster) -> Cluster:
    """The cluster by servers if its links are a matrix with one link between all devices.

    Any other is returned as it is.
    """
    links = cluster.links
    apart = ~np.eye(len(cluster), dtype=bool)
    if not isinstance(links, MatrixLinks) or not (cluster.direct_bandwidth[apart] > 0).all():
        return cluster
    found = set(zip(cluster.bandwidth[apart], cluster.latency[apart], strict=True))
    if len(found) != 1:
        return cluster
    link = Link(*map(float, found.pop()))
    servers = links.servers or (tuple(device.name for device in cluster.devices),)
    return replace(cluster, links=ServerLinks(servers, link, link if len(servers) > 1 else None))


def _with_matrix(
    name: str,
    devices: Sequence[Device],
    servers: Sequence[Sequence[str]],
    groups: Sequence[ServerGroup],
) -> Cluster:
    """The cluster of servers with unequal links; ``groups`` has the group of every server."""
    if len(devices) > MAX_MATRIX:
        raise InputError(
            f"{len(devices)} devices with unequal links need a matrix of links, which may have at "
            f"most {MAX_MATRIX}; give every server the same links"
        )
    ends = np.cumsum([0, *(len(one.devices) for one in groups)])
    spans = [slice(*pair) for pair in pairwise(ends)]
    bandwidth, latency = np.zeros((2, len(devices), len(devices)))
    for i, one in enumerate(groups):
        for j, other in enumerate(groups):
            link = _link(one, other) if i != j else one.intra or one.inter
            if link is None:
                raise InputError("the servers must be connected: give the link between servers")
            at = spans[i], spans[j]
            bandwidth[at], latency[at] = _entries(link)
    rows = [[entry or None for entry in row] for row in bandwidth.tolist()]
    seconds: float | list[list[float]] = latency.tolist()
    if (latency == latency[0, -1]).all():
        seconds = float(latency[0, -1])
    return from_matrix(devices, rows, seconds, servers=servers, name=name)


def _link(one: ServerGroup, other: ServerGroup) -> Link | None:
    """The link between devices of two servers; None if one of them has none."""
    if one.inter is None or other.inter is None:
        return None
    return Link(
        min(one.inter.bandwidth_bytes_per_second, other.inter.bandwidth_bytes_per_second),
        max(one.inter.latency_seconds, other.inter.latency_seconds),
    )


def _entries(link: Link | Cluster) -> tuple[Floats | float, Floats | float]:
    """Bandwidths and latencies of a link, or of the direct links in a server."""
    if isinstance(link, Link):
        return link.bandwidth_bytes_per_second, link.latency_seconds
    assert isinstance(link.links, MatrixLinks)
    return link.direct_bandwidth, np.array(link.links.latency_seconds)


MAX_GPUS = 1 << 20


@documents.record
class Level:
    """Units of ``devices`` devices, and the links between the units of the next lower level in it.

    ``bytes_per_second`` is what every device can send out of its unit while all devices do (its
    part of a server's network cards), ``latency_seconds`` what a message takes.
    """

    name: str
    devices: int
    bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        require_count(self.devices, f"{self.name}: devices", MAX_GPUS)
        require_bandwidth(self.bytes_per_second, f"{self.name}: bytes_per_second")
        require_amount(self.latency_seconds, f"{self.name}: latency_seconds")


@documents.record
class Fabric:
    """``levels`` from the server outwards; the last holds all devices, of kind ``device``.

    ``host_bytes_per_second`` is a device's bandwidth to host memory in each direction, None if not
    known; ``own_kind`` describes the kind if it is the user's own, not one of ``ACCELERATORS``.
    """

    device: str
    memory_bytes: float
    levels: tuple[Level, ...]
    host_bytes_per_second: float | None = None
    own_kind: Accelerator | None = None

    def __post_init__(self) -> None:
        if self.own_kind is not None and self.own_kind.name != self.device:
            raise InputError(
                f"the devices are of kind {self.device!r}, but own_kind is {self.own_kind.name!r}"
            )
        if self.own_kind is not None and self.device.lower() in ACCELERATORS:
            raise InputError(f"own_kind: {self.device!r} is a kind that is built in")
        require_amount(self.memory_bytes, "memory_bytes")
        if not 1 <= len(self.levels) <= 3:
            raise InputError(f"a fabric has one to three levels, got {len(self.levels)}")
        for inner, outer in zip(self.levels, self.levels[1:], strict=False):
            if outer.devices % inner.devices:
                raise InputError(
                    f"{outer.name} has {outer.devices} devices, which is no multiple of the "
                    f"{inner.devices} of {inner.name}"
                )

    @property
    def card(self) -> Accelerator:
        """The peaks of the devices. Raises InputError if the kind is not known."""
        return self.own_kind or accelerator(self.device)

    @property
    def devices(self) -> int:
        """The number of all devices."""
        return self.levels[-1].devices

    @property
    def per_server(self) -> int:
        """Devices in a server."""
        return self.levels[0].devices


def fabric_of(cluster: Cluster) -> Fabric:
    """The fabric of a cluster of equal devices in equal servers (and racks).

    Raises InputError if devices, servers or racks differ, or the links of the devices of a server.
    """
    first, links = cluster.devices[0], with_levels(cluster).links
    if not isinstance(links, ServerLinks):
        raise InputError(
            f"cluster {cluster.name!r} has a matrix of unequal links; equal servers of equal "
            "devices are needed here, with the same link between all devices of a server"
        )
    for one in cluster.devices:
        if (one.kind, one.memory_bytes) != (first.kind, first.memory_bytes):
            raise InputError(
                f"cluster {cluster.name!r}: device {one.name!r} differs from {first.name!r}; equal "
                "devices are needed here"
            )
    found = [("server", _equal(links.servers, "servers"), links.intra)]
    if links.inter is not None:
        racks = links.racks or (tuple(one.name for one in cluster.devices),)
        found.append(("rack", _equal(racks, "racks"), links.inter))
    if links.racks is not None and links.inter_rack is not None:
        found.append(("cluster", len(cluster.devices), links.inter_rack))
    levels = tuple(
        Level(name, count, link.bandwidth_bytes_per_second, link.latency_seconds)
        for name, count, link in found
    )
    return Fabric(first.kind, first.memory_bytes, levels, first.host_bytes_per_second)


def cluster_of(fabric: Fabric) -> Cluster:
    """The cluster with a list of the fabric's devices, s0g0, s0g1, ...; inverse of `fabric_of`.

    Raises InputError if there are more devices than a cluster can have.
    """
    require_count(fabric.devices, "the number of devices", MAX_DEVICES)
    size = fabric.per_server
    names = tuple(f"s{i // size}g{i % size}" for i in range(fabric.devices))
    inside, *between = [
        Link(level.bytes_per_second, level.latency_seconds) for level in fabric.levels
    ]
    links = ServerLinks(_units(names, size), inside)
    if between:
        links = replace(links, inter=between[0])
    if len(between) > 1:
        racks = _units(names, fabric.levels[1].devices)
        links = replace(links, racks=racks, inter_rack=between[1])
    kind, memory, host = fabric.device, fabric.memory_bytes, fabric.host_bytes_per_second
    devices = tuple(Device(name, kind, memory, host_bytes_per_second=host) for name in names)
    return Cluster(f"{fabric.devices} {kind}", devices, links)


def _units(names: tuple[str, ...], size: int) -> tuple[tuple[str, ...], ...]:
    return tuple(names[i : i + size] for i in range(0, len(names), size))


def _equal(units: tuple[tuple[str, ...], ...], what: str) -> int:
    sizes = {len(unit) for unit in units}
    if len(sizes) > 1:
        raise InputError(f"{what} of equal size are needed here, got {sorted(sizes)} devices")
    return sizes.pop()
