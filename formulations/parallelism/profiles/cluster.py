"""Clusters of unequal servers: pools of equal servers, zones, and rates of their links."""

from collections import Counter

from stagewright.formulations.prices.collectives import link_seconds, ring_seconds
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    MAX_DEVICES,
    require_amount,
    require_bandwidth,
    require_count,
)
from stagewright.graphs.machines.cluster import Cluster, Link, ServerLinks
from stagewright.graphs.machines.devices import ACCELERATORS, accelerator
from stagewright.graphs.machines.fabric import with_levels
from stagewright.graphs.machines.networks import NETWORK_LATENCY, SERVER_LATENCY, fabric_of_kind

WHOLE = "whole"


@documents.record
class Route:
    """Rates of a link: bytes/s of each device in a ring, and of a whole group at most.

    A tensor group sends a tensor to another with all its devices: at ``device_bytes_per_second``
    times their number, at most ``group_bytes_per_second``. In an all-reduce every rank of the
    tensor groups has a ring of its own, at ``device_bytes_per_second``.
    """

    device_bytes_per_second: float
    group_bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        require_bandwidth(self.device_bytes_per_second, "device_bytes_per_second")
        require_bandwidth(self.group_bytes_per_second, "group_bytes_per_second")
        require_amount(self.latency_seconds, "latency_seconds")

    def through(self, other: "Route") -> "Route":
        """The route over this and then the other route: the slower rate and larger latency."""
        return Route(
            min(self.device_bytes_per_second, other.device_bytes_per_second),
            min(self.group_bytes_per_second, other.group_bytes_per_second),
            max(self.latency_seconds, other.latency_seconds),
        )

    def send_seconds(self, moved: float, tensor: int) -> float:
        """Time to send ``moved`` bytes between two groups; ``tensor`` is the smaller group's size.

        Both groups are busy with it.
        """
        rate = min(tensor * self.device_bytes_per_second, self.group_bytes_per_second)
        return link_seconds(moved, rate, self.latency_seconds)

    def reduce_seconds(self, moved: float, size: int) -> float:
        """Time to sum ``moved`` bytes per rank over a ring of ``size`` ranks."""
        return 2 * ring_seconds(size, moved, self.device_bytes_per_second, self.latency_seconds)


@documents.record
class Pool:
    """Equal servers in one zone. ``inside`` is between devices of a server (None: as outside)."""

    device_kind: str
    zone: str
    servers: int
    devices: int
    memory_bytes: float
    network: Route
    inside: Route | None = None

    def __post_init__(self) -> None:
        place = f"pool of {self.device_kind!r} in {self.zone!r}"
        require_count(self.servers, f"{place}: servers", MAX_DEVICES)
        require_count(self.devices, f"{place}: devices", MAX_DEVICES)
        require_amount(self.memory_bytes, f"{place}: memory_bytes")


@documents.record
class ServerPools:
    """The cluster; ``between_zones`` is needed with several zones."""

    pools: tuple[Pool, ...]
    between_zones: Route | None = None

    def __post_init__(self) -> None:
        if not self.pools:
            raise InputError("a cluster needs at least one pool of servers")
        zones = sorted({pool.zone for pool in self.pools})
        if len(zones) > 1 and self.between_zones is None:
            raise InputError(f"zones {', '.join(zones)}: between_zones is missing")

    def route(self, one: int, other: int, *, same_server: bool) -> Route:
        """The route between two tensor groups in the pools with indices ``one`` and ``other``."""
        first, second = self.pools[one], self.pools[other]
        if same_server and first.inside is not None:
            return first.inside
        found = first.network.through(second.network)
        if first.zone != second.zone and self.between_zones is not None:
            return found.through(self.between_zones)
        return found


def server_pools(cluster: Cluster) -> ServerPools:
    """The pools of a cluster of servers; racks are its zones.

    A link's bandwidth is what each device of a server reaches while all send.

    Raises
    ------
    InputError
        If the links or the devices of a server differ.
    """
    links = with_levels(cluster).links
    if not isinstance(links, ServerLinks):
        raise InputError(
            f"cluster {cluster.name!r} has a matrix of unequal links; one link inside and one "
            "between servers are needed here"
        )
    rack_of = {name: f"rack {number}" for number, rack in enumerate(links.racks or ())
               for name in rack}  # fmt: skip
    found = Counter(
        (*_equal_devices(cluster, server), len(server), rack_of.get(server[0], WHOLE))
        for server in links.servers
    )
    between = links.inter or links.inter_rack or links.intra
    pools = tuple(
        Pool(kind, zone, servers, devices, memory, _route(between, devices),
             _route(links.intra, devices) if devices > 1 else None)
        for (kind, memory, devices, zone), servers in found.items()
    )  # fmt: skip
    most = max(pool.devices for pool in pools)
    apart = links.inter_rack if links.racks and len(links.racks) > 1 else None
    return ServerPools(pools, None if apart is None else _route(apart, most))


def _equal_devices(cluster: Cluster, server: tuple[str, ...]) -> tuple[str, float]:
    """Kind and memory of the devices of a server."""
    first, *others = [cluster.devices[cluster.index[name]] for name in server]
    for one in others:
        if (one.kind, one.memory_bytes) != (first.kind, first.memory_bytes):
            raise InputError(
                f"cluster {cluster.name!r}: device {one.name!r} differs from {first.name!r} of the "
                "same server; servers of equal devices are needed here"
            )
    return first.kind, first.memory_bytes


def _route(link: Link, devices: int) -> Route:
    rate = link.bandwidth_bytes_per_second
    return Route(rate, devices * rate, link.latency_seconds)


def pool_of_kind(
    kind: str,
    servers: int,
    devices: int,
    *,
    memory_bytes: float | None = None,
    server_bandwidth: float | None = None,
    network_bandwidth: float | None = None,
) -> Pool:
    """``servers`` x ``devices`` of a kind; bandwidths are bytes/s per device, while all send.

    What is not given is that of the kind (:mod:`stagewright.graphs.machines.networks`).

    Raises
    ------
    InputError
        If something of the kind is not known and not given.
    """
    require_count(servers, f"{kind}: servers", MAX_DEVICES)
    require_count(devices, f"{kind}: devices", MAX_DEVICES)
    if kind.lower() in ACCELERATORS:
        # Two servers, so that the network is known where there is one.
        inside, between = (
            level.bytes_per_second
            for level in fabric_of_kind(
                kind,
                2 * devices,
                per_server=devices,
                server_bandwidth=server_bandwidth,
                network_bandwidth=network_bandwidth,
            ).levels
        )
    else:
        inside = _required(server_bandwidth, "server_bandwidth", kind)
        between = _required(network_bandwidth, "network_bandwidth", kind)
    return Pool(
        kind,
        WHOLE,
        servers,
        devices,
        _memory(kind) if memory_bytes is None else memory_bytes,
        Route(between, devices * between, NETWORK_LATENCY),
        Route(inside, devices * inside, SERVER_LATENCY) if devices > 1 else None,
    )


def _memory(kind: str) -> float:
    if kind.lower() not in ACCELERATORS:
        raise InputError(f"memory_bytes of {kind} is not known: give it, for example {kind}=40GB")
    return accelerator(kind).memory_bytes


def _required(value: float | None, name: str, kind: str) -> float:
    if value is None:
        raise InputError(f"{name} of {kind} is not known: give it, for example {kind}=10GB/s")
    return value
