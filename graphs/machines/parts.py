"""Clusters made of a given one: its first devices, other memory."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster, Links, MatrixLinks, ServerLinks


def first_devices(cluster: Cluster, count: int) -> Cluster:
    """The first ``count`` devices in the order of the document, with the links between them.

    Links of a matrix are those of the document: a path through a device that is left out is lost.

    Raises
    ------
    InputError
        If the cluster has fewer, or these are not connected without the others.
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
    return Cluster(name, kept, links, cluster.all_reduce_share)


def with_memory(cluster: Cluster, memory_bytes: float) -> Cluster:
    """The cluster with that much memory on every device."""
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
    return replace(cluster, devices=devices)


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
