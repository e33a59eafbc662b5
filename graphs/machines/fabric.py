"""A large uniform cluster by its levels: servers, racks, all; without a list of its devices.

Ranks are numbered through the levels: those of a server first, then those of a rack.
"""

from dataclasses import replace

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    MAX_DEVICES,
    require_amount,
    require_bandwidth,
    require_count,
)
from stagewright.graphs.machines.cluster import Cluster, Device, Link, ServerLinks
from stagewright.graphs.machines.devices import ACCELERATORS, Accelerator, accelerator
from stagewright.graphs.machines.servers import with_levels

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
