"""One order of the devices for all descriptions of a cluster that differ in names and order alone.

A search whose ties are broken by position then gives them the same answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.machines.cluster import Cluster, Device, Links, MatrixLinks, ServerLinks

MOST_BRANCHED = 64  # devices of a matrix; in larger ones equal devices keep their given order


@lru_cache(maxsize=8)  # a first plan and the search ask for it
def canonical_order(cluster: Cluster) -> tuple[int, ...]:
    """The positions of the devices in canonical order; devices that are alike keep their order.

    With servers: by size and kinds of devices. With a matrix: by colour refinement (Weisfeiler and
    Leman 1968), where a device is set apart wherever refinement leaves several alike. Two orders
    of one cluster can only differ in a matrix of which refinement leaves devices alike, with one of
    them set apart, that no symmetry maps to each other.
    """
    is_matrix = isinstance(cluster.links, MatrixLinks)
    return tuple(_order_of_matrix(cluster) if is_matrix else _order_of_servers(cluster))


def reordered(cluster: Cluster, order: Sequence[int]) -> Cluster:
    """The cluster of the devices at the positions ``order``, its servers and racks likewise.

    The cluster itself where nothing changes. Where devices are left out, a matrix keeps the widest
    paths through them as links.
    """
    devices = tuple(cluster.devices[v] for v in order)
    place = {device.name: i for i, device in enumerate(devices)}
    found: Links
    if isinstance(cluster.links, MatrixLinks):
        found = _matrix(cluster, cluster.links, order, place)
    else:
        found = _servers(cluster.links, place)
    if devices == cluster.devices and found == cluster.links:
        return cluster
    return replace(cluster, devices=devices, links=found)


def _matrix(
    cluster: Cluster, links: MatrixLinks, order: Sequence[int], place: dict[str, int]
) -> MatrixLinks:
    bandwidth, latency = links.bandwidth_bytes_per_second, links.latency_seconds
    if len(order) < len(cluster):
        at = np.ix_(order, order)
        wide = np.where(np.isfinite(cluster.bandwidth), cluster.bandwidth, 0.0)[at]
        bandwidth = tuple(tuple(one or None for one in row) for row in wide.tolist())
        if isinstance(latency, tuple) or latency > 0:
            latency = tuple(map(tuple, cluster.latency[at].tolist()))
    else:
        bandwidth = tuple(tuple(bandwidth[i][j] for j in order) for i in order)
        if isinstance(latency, tuple):
            latency = tuple(tuple(latency[i][j] for j in order) for i in order)
    servers = None if links.servers is None else _sorted_groups(links.servers, place)
    return MatrixLinks(bandwidth, latency, servers)


def _servers(links: ServerLinks, place: dict[str, int]) -> ServerLinks:
    """The links of the levels that are left; links between servers need several of them."""
    servers = _sorted_groups(links.servers, place)
    racks = None if links.racks is None else _sorted_groups(links.racks, place)
    if racks is not None and len(racks) == 1:
        racks = None
    inter = links.inter if len(servers) > 1 else None
    return ServerLinks(servers, links.intra, inter, racks, links.inter_rack if racks else None)


def _sorted_groups(
    groups: Iterable[Sequence[str]], place: dict[str, int]
) -> tuple[tuple[str, ...], ...]:
    """The groups of the devices that have a place, by their first ones."""
    kept = (sorted((n for n in one if n in place), key=place.__getitem__) for one in groups)
    return tuple(map(tuple, sorted((one for one in kept if one), key=lambda one: place[one[0]])))


def _key(device: Device) -> tuple[str, float, float, float]:
    """What distinguishes a device, but for its name; those with most memory come first."""
    return (
        device.kind, -device.memory_bytes, -(device.peak_flops or 0.0),
        -(device.host_bytes_per_second or 0.0),
    )  # fmt: skip


def _order_of_servers(cluster: Cluster) -> list[int]:
    """The largest racks and servers first; equal ones as their devices are given."""
    key_of = [_key(device) for device in cluster.devices]

    def merged(groups: Iterable[Sequence[Sequence[int]]]) -> list[list[int]]:
        """Every group of ordered parts in order: the largest parts first."""
        return [[v for part in sorted(one, key=largest) for v in part] for one in groups]

    def largest(part: Sequence[int]) -> tuple[int, list[tuple[str, float, float, float]], int]:
        return -len(part), [key_of[v] for v in part], min(part)

    servers = merged([[v] for v in one] for one in cluster.servers)
    racks = getattr(cluster.links, "racks", None) or [[device.name for device in cluster.devices]]
    rack_of = {cluster.index[name]: number for number, rack in enumerate(racks) for name in rack}
    held: list[list[list[int]]] = [[] for _ in racks]
    for server in servers:
        if server:
            held[rack_of[server[0]]].append(server)
    return merged([[rack for rack in merged(held) if rack]])[0]


def _order_of_matrix(cluster: Cluster) -> list[int]:
    """By colours, which are refined until each device has its own."""
    size = len(cluster)
    home = {v: number for number, server in enumerate(cluster.servers) for v in server}
    homes = np.array([home[v] for v in range(size)])
    bandwidth, late = cluster.direct_bandwidth, cluster.direct_latency
    apart = np.not_equal.outer(homes, homes)
    every = np.stack([-bandwidth, -bandwidth.T, late, late.T, apart], axis=-1)  # best links first
    codes = np.unique(every.reshape(size * size, -1), axis=0, return_inverse=True)[1]
    pairs = codes.reshape(size, size) + 1
    np.fill_diagonal(pairs, 0)
    keys = [_key(device) for device in cluster.devices]
    ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    colour = _refined(pairs, np.array([ranks[key] for key in keys]))[0]
    while colour.max() + 1 < size and size <= MOST_BRANCHED:
        colour = _apart(pairs, colour)
    order: list[int] = np.argsort(colour, kind="stable").tolist()
    return order


def _refined(pairs: Ints, colour: Ints) -> tuple[Ints, Ints]:
    """Colours that tell devices with other links apart, and the links of each colour."""
    while True:
        rows = np.sort(pairs * len(pairs) + colour, axis=1)
        kinds, finer = np.unique(np.column_stack([colour, rows]), axis=0, return_inverse=True)
        finer = finer.reshape(-1)
        if finer.max() == colour.max():
            return finer, kinds
        colour = finer


def _apart(pairs: Ints, colour: Ints) -> Ints:
    """The first colour of several devices divided: into all if they are interchangeable.

    Otherwise one device is set apart: that with the least links of each colour then.
    """
    shared = int(np.flatnonzero(np.bincount(colour) > 1)[0])
    alike = np.flatnonzero(colour == shared)
    if _are_interchangeable(pairs, alike):
        finer = colour * len(pairs)
        finer[alike] += np.arange(len(alike))
        return _refined(pairs, _dense(finer))[0]

    def without(v: int) -> tuple[Ints, Ints]:
        finer = 2 * colour + 1
        finer[v] -= 1
        return _refined(pairs, _dense(finer))

    return min(map(without, alike.tolist()), key=lambda found: found[1].tolist())[0]


def _dense(colour: Ints) -> Ints:
    return np.unique(colour, return_inverse=True)[1].reshape(-1)


def _are_interchangeable(pairs: Ints, alike: Ints) -> bool:
    """Whether to exchange any two of the devices changes no link."""
    inside = pairs[np.ix_(alike, alike)][~np.eye(len(alike), dtype=bool)]
    others = np.delete(pairs[alike], alike, axis=1)
    return bool((inside == inside[0]).all() and (others == others[0]).all())
