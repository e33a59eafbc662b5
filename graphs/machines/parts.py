"""Clusters made of a given one: its first devices, one more server, other memory or links."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MIN_BANDWIDTH
from stagewright.graphs.machines.cluster import Cluster, Link, Links, MatrixLinks, ServerLinks


def first_devices(cluster: Cluster, count: int) -> Cluster:
    """The first ``count`` devices in the order of the document, with the links between them.

    Links of a matrix are those of the document: a path through a device that is left out is lost.
    Raises InputError if the cluster has fewer, or these are not connected without the others.
    """
    if not 1 <= count <= len(cluster):
        raise InputError(
            f"devices must be 1 to {len(cluster)}, as cluster {cluster.name!r} has, got {count}"
        )
    if count == len(cluster):
        return cluster
    kept = cluster.devices[:count]
    names = {device.name for device in kept}
    name = f"{cluster.name}, first {count}"
    if isinstance(cluster.links, MatrixLinks):
        links: Links = _matrix_of(cluster.links, count, names)
    else:
        links = _servers_of(cluster.links, names)
    return replace(cluster, name=name, devices=kept, links=links, source=None)


def with_memory(cluster: Cluster, memory_bytes: float) -> Cluster:
    """The cluster with that much memory on every device."""
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
    return replace(cluster, devices=devices)


def with_faster_links(cluster: Cluster, times: float, within: bool = False) -> Cluster:
    """The cluster with ``times`` the bandwidth between its servers, or ``within`` them.

    Latencies stay. Links between racks are links between servers. With a matrix that names no
    servers, all devices are one server. Raises InputError if there are no such links.
    """
    places = [cluster.servers[0]] if len(cluster.servers) == 1 else cluster.servers
    where = "within servers" if within else "between servers"
    if (not within and len(places) == 1) or (within and max(map(len, places)) == 1):
        raise InputError(f"cluster {cluster.name!r} has no links {where}")
    links = cluster.links
    if isinstance(links, MatrixLinks):
        return replace(cluster, links=_scaled_matrix(links, places, times, within))
    if within:
        return replace(cluster, links=replace(links, intra=_scaled(links.intra, times)))
    inter = links.inter and _scaled(links.inter, times)
    inter_rack = links.inter_rack and _scaled(links.inter_rack, times)
    return replace(cluster, links=replace(links, inter=inter, inter_rack=inter_rack))


def with_slower_links(cluster: Cluster, times: float) -> Cluster:
    """The cluster on which every transfer takes ``times`` as long, latencies too.

    No bandwidth becomes less than a cluster may have.
    """
    links = cluster.links
    if isinstance(links, ServerLinks):
        levels: dict[str, Any] = {
            name: Link(
                _slower(link.bandwidth_bytes_per_second, times), times * link.latency_seconds
            )
            for name in ("intra", "inter", "inter_rack")
            if (link := getattr(links, name)) is not None
        }
        return replace(cluster, links=replace(links, **levels))
    latency = links.latency_seconds
    slow = replace(
        links,
        bandwidth_bytes_per_second=tuple(
            tuple(None if one is None else _slower(one, times) for one in row)
            for row in links.bandwidth_bytes_per_second
        ),
        latency_seconds=tuple(tuple(times * one for one in row) for row in latency)
        if isinstance(latency, tuple)
        else times * latency,
    )
    return replace(cluster, links=slow)


def _slower(bandwidth: float, times: float) -> float:
    return max(bandwidth / times, MIN_BANDWIDTH)


def with_one_more(cluster: Cluster) -> tuple[Cluster, str]:
    """The cluster with a copy of its last server (of several) or last device; and what was copied.

    Raises InputError if its links are a matrix, which says nothing of the links of another device.
    """
    links, devices = cluster.links, cluster.devices
    if isinstance(links, MatrixLinks):
        raise InputError(
            f"cluster {cluster.name!r} has a matrix of links, which does not say those of another "
            "device"
        )
    single = len(links.servers) == 1
    copied = (devices[-1].name,) if single else links.servers[-1]
    named = {name: f"{name}'" for name in copied}
    added = tuple(replace(one, name=named[one.name]) for one in devices if one.name in named)
    new = tuple(named.values())
    servers = ((*links.servers[0], *new),) if single else (*links.servers, new)
    racks = links.racks
    if racks is not None:
        racks = (*racks[:-1], (*racks[-1], *new))
    what = "device" if single else f"server of {len(new)}"
    found = replace(cluster, devices=(*devices, *added), links=replace(
        links, servers=servers, racks=racks))  # fmt: skip
    return found, f"one more {what}"


def _scaled(link: Link, times: float) -> Link:
    return replace(link, bandwidth_bytes_per_second=times * link.bandwidth_bytes_per_second)


def _scaled_matrix(
    links: MatrixLinks, servers: Sequence[Sequence[int]], times: float, within: bool
) -> MatrixLinks:
    home = {v: n for n, server in enumerate(servers) for v in server}
    rows = (
        tuple(
            one if one is None or (home[i] == home[j]) != within else times * one
            for j, one in enumerate(row)
        )
        for i, row in enumerate(links.bandwidth_bytes_per_second)
    )
    return replace(links, bandwidth_bytes_per_second=tuple(rows))


def _matrix_of(links: MatrixLinks, count: int, names: Collection[str]) -> MatrixLinks:
    latency = links.latency_seconds
    return MatrixLinks(
        tuple(row[:count] for row in links.bandwidth_bytes_per_second[:count]),
        latency if isinstance(latency, float) else tuple(row[:count] for row in latency[:count]),
        None if links.servers is None else _within(links.servers, names),
    )


def _servers_of(links: ServerLinks, names: Collection[str]) -> ServerLinks:
    racks = None if links.racks is None else _within(links.racks, names)
    return replace(links, servers=_within(links.servers, names), racks=racks)


def _within(groups: Sequence[Sequence[str]], names: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """The names of each group that are left, without groups that are empty then."""
    left = (tuple(name for name in group if name in names) for group in groups)
    return tuple(group for group in left if group)
