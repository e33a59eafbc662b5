"""Clusters of servers: several equal servers, or servers of several kinds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_DEVICES, require_count
from stagewright.graphs.machines.cluster import (
    Cluster,
    Device,
    Link,
    MatrixLinks,
    ServerLinks,
    from_matrix,
)

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
