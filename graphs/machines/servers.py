"""Clusters of servers: several equal servers, or servers of several kinds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """``servers`` equal servers, each with ``devices`` devices like ``device``, whatever its name.

    ``intra`` is the link between devices of a server, ``inter`` that to devices of other servers;
    None where there is no such pair.
    """

    device: Device
    servers: int
    devices: int
    intra: Link | None
    inter: Link | None


def mixed_servers(groups: Sequence[ServerGroup], name: str) -> Cluster:
    """The servers of all groups, with devices named s0g0, s0g1, ...

    Servers of two groups communicate at the lower bandwidth and the higher latency of both. If the
    groups have the same links the cluster has levels, else a matrix of at most ``MAX_MATRIX``
    devices. Raises InputError if there are too many devices, or a link is missing.
    """
    for one in groups:
        require_count(one.servers, "the number of servers", MAX_DEVICES)
        require_count(one.devices, "the number of devices per server", MAX_DEVICES)
    total = sum(one.servers * one.devices for one in groups)
    require_count(total, "the number of devices", MAX_DEVICES)
    of_server = [group for group in groups for _ in range(group.servers)]
    servers = tuple(
        tuple(f"s{s}g{g}" for g in range(group.devices)) for s, group in enumerate(of_server)
    )
    devices = tuple(
        replace(group.device, name=id_)
        for group, server in zip(of_server, servers, strict=True)
        for id_ in server
    )
    inside = {one.intra for one in groups if one.intra is not None and one.devices > 1}
    between = {one.inter for one in groups if len(of_server) > 1}
    if len(inside) <= 1 and len(between) <= 1:
        inter = next(iter(between), None)
        intra = next(iter(inside), inter or groups[0].intra)
        if intra is None:
            raise InputError(f"cluster {name!r} has no links: give that inside a server")
        return Cluster(name, devices, ServerLinks(servers, intra, inter))
    return _with_matrix(name, devices, servers, of_server)


def repeated(one: Cluster, servers: int, inter: Link) -> Cluster:
    """``servers`` servers like ``one``, with ``inter`` between their devices: s0GPU0, s1GPU0, ...

    If all pairs of ``one`` have the same link the cluster has levels, else a matrix of at most
    ``MAX_MATRIX`` devices. Raises InputError if there are too many devices, or ``one`` is no matrix
    of links.
    """
    require_count(servers, "the number of servers", MAX_DEVICES)
    require_count(servers * len(one), "the number of devices", MAX_DEVICES)
    if not isinstance(one.links, MatrixLinks):
        raise InputError(f"cluster {one.name!r} has servers already; one of a matrix is needed")
    name = f"{servers} x {one.name}"
    names = tuple(
        tuple(f"s{number}{device.name}" for device in one.devices) for number in range(servers)
    )
    devices = tuple(
        replace(device, name=id_)
        for server in names
        for device, id_ in zip(one.devices, server, strict=True)
    )
    alike = with_levels(one).links
    if isinstance(alike, ServerLinks) or len(one) == 1:
        intra = alike.intra if isinstance(alike, ServerLinks) else inter
        return Cluster(name, devices, ServerLinks(names, intra, inter), source=one.source)
    _require_matrix(len(devices))
    latency = np.broadcast_to(np.array(one.links.latency_seconds), (len(one),) * 2)
    bandwidth = _blocks(one.direct_bandwidth, servers, inter.bandwidth_bytes_per_second)
    seconds = _blocks(latency, servers, inter.latency_seconds)
    return replace(_matrix(name, devices, names, bandwidth, seconds), source=one.source)


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


def _blocks(inside: Floats, servers: int, between: float) -> Floats:
    """A matrix of servers: ``inside`` on the diagonal, ``between`` elsewhere."""
    size = len(inside)
    every = np.full((servers * size, servers * size), between)
    for number in range(servers):
        own = slice(number * size, (number + 1) * size)
        every[own, own] = inside
    return every


def _with_matrix(
    name: str,
    devices: Sequence[Device],
    servers: Sequence[Sequence[str]],
    groups: Sequence[ServerGroup],
) -> Cluster:
    """The cluster of servers with unequal links; ``groups`` has the group of every server."""
    _require_matrix(len(devices))
    every = range(len(groups))
    links = [[_link(groups, one, other) for other in every] for one in every]
    bandwidth = np.array([[one.bandwidth_bytes_per_second for one in row] for row in links])
    latency = np.array([[one.latency_seconds for one in row] for row in links])
    of_device = np.repeat(every, [one.devices for one in groups])
    pairs = np.ix_(of_device, of_device)
    return _matrix(name, devices, servers, bandwidth[pairs], latency[pairs])


def _link(groups: Sequence[ServerGroup], one: int, other: int) -> Link:
    """The link between devices of two servers, or of the same server."""
    first, second = groups[one], groups[other]
    ends = [first.intra or first.inter] if one == other else [first.inter, second.inter]
    known = [link for link in ends if link is not None]
    if len(known) < len(ends):
        raise InputError("the servers must be connected: give the link between servers")
    return Link(
        min(link.bandwidth_bytes_per_second for link in known),
        max(link.latency_seconds for link in known),
    )


def _matrix(
    name: str,
    devices: Sequence[Device],
    servers: Sequence[Sequence[str]],
    bandwidth: Floats,
    latency: Floats,
) -> Cluster:
    rows = [[entry or None for entry in row] for row in bandwidth.tolist()]
    seconds: float | list[list[float]] = latency.tolist()
    if (latency == latency[0, -1]).all():
        seconds = float(latency[0, -1])
    return from_matrix(devices, rows, seconds, servers=servers, name=name)


def _require_matrix(devices: int) -> None:
    if devices > MAX_MATRIX:
        raise InputError(
            f"{devices} devices with unequal links need a matrix of links, which may have at most "
            f"{MAX_MATRIX}; give every server the same links"
        )
