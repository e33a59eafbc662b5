"""A cluster: devices and the links between them."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Tag

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    MAX_DEVICES,
    MIN_MEMORY,
    require_amount,
    require_bandwidth,
    require_count,
)
from stagewright.graphs.machines.pairs import DensePairs, NestedPairs, Pairs


@documents.record
class Device:
    """One accelerator: ``name`` is its id in every plan, ``kind`` selects the layers' costs.

    ``host_bytes_per_second`` is the bandwidth to host memory in each direction, full duplex; None
    if not known.
    """

    name: str
    kind: str
    memory_bytes: float
    peak_flops: float | None = None
    host_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        place = f"device {self.name!r}: "
        require_amount(self.memory_bytes, place + "memory_bytes")
        if self.memory_bytes < MIN_MEMORY:
            raise InputError(
                f"{place}memory_bytes is {self.memory_bytes:g}, less than 1 MB: is a unit missing? "
                f"{self.memory_bytes:g} GB is {self.memory_bytes * 1e9:g}"
            )
        if self.peak_flops is not None:
            require_amount(self.peak_flops, place + "peak_flops")
        if self.host_bytes_per_second is not None:
            require_bandwidth(self.host_bytes_per_second, place + "host_bytes_per_second")


@documents.record
class Link:
    """One kind of link: bandwidth per direction (bytes/s) and latency (s)."""

    bandwidth_bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        require_bandwidth(self.bandwidth_bytes_per_second, "bandwidth_bytes_per_second")
        require_amount(self.latency_seconds, "latency_seconds")


@documents.record
class ServerLinks:
    """Servers of devices: one kind of link inside each server, one between servers.

    ``racks`` lists the devices of each rack, which is a union of servers; ``inter`` is then between
    servers of a rack, and ``inter_rack`` between racks.
    """

    servers: tuple[tuple[str, ...], ...]
    intra: Link
    inter: Link | None = None
    racks: tuple[tuple[str, ...], ...] | None = None
    inter_rack: Link | None = None


@documents.record
class MatrixLinks:
    """Any links: bandwidth[i][j] in bytes/s from device i to device j, None for no direct link.

    The diagonal is ignored. ``latency_seconds`` is one number or a matrix of the same shape.
    ``servers`` lists the devices of each server, for planners that use them.
    """

    bandwidth_bytes_per_second: tuple[tuple[float | None, ...], ...]
    latency_seconds: float | tuple[tuple[float, ...], ...] = 0.0
    servers: tuple[tuple[str, ...], ...] | None = None


Links = Annotated[
    Annotated[ServerLinks, Tag("servers")] | Annotated[MatrixLinks, Tag("matrix")],
    documents.told_by({"intra": "servers"}, "matrix"),
]


@dataclass(frozen=True)
class Cluster:
    """Devices and links. Devices without a direct link use the widest path between them.

    ``all_reduce_share`` is the share of its slowest link's bandwidth that a ring all-reduce
    reaches, as it also copies and adds; None if it is not known, and all is assumed.
    ``message_seconds`` is the time of its own that a device spends on each message it sends or
    receives, in the computation that makes or takes it; None if it is not known, and none is
    assumed. Its bytes add to that by ``message_bytes_per_second`` (None: nothing). ``source`` says
    where the figures are from that nobody gave.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    name: str
    devices: tuple[Device, ...]
    links: Links
    all_reduce_share: float | None = None
    message_seconds: float | None = None
    message_bytes_per_second: float | None = None
    source: str | None = None
    format: Literal["stagewright-cluster"] = "stagewright-cluster"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        if not self.devices:
            raise InputError(f"cluster {self.name!r} has no devices")
        names = [device.name for device in self.devices]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"two devices are named {twice!r}; device names must be unique")
        share = self.all_reduce_share
        if share is not None and not 0 < share <= 1:
            raise InputError(f"all_reduce_share must be above 0 and at most 1, got {share:g}")
        _require_message_price(self.message_seconds, self.message_bytes_per_second)
        if self.links.servers is not None:
            _require_cover("servers", self.links.servers, names)
        if isinstance(self.links, MatrixLinks):
            _require_matrix(self.links, names)
            _require_connected(self)
        else:
            _require_levels(self.name, self.links, names)

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def all_reduce_slowdown(self) -> float:
        """How much longer the bytes of an all-reduce take than on its links alone; at least 1."""
        return 1 / (self.all_reduce_share or 1.0)

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each device name in ``devices``."""
        return {device.name: i for i, device in enumerate(self.devices)}

    @cached_property
    def servers(self) -> tuple[tuple[int, ...], ...]:
        """Device positions per server; one server of all devices if none are given."""
        if self.links.servers is None:
            return (tuple(range(len(self.devices))),)
        return tuple(tuple(self.index[name] for name in server) for server in self.links.servers)

    @cached_property
    def pairs(self) -> Pairs:
        """The links of all pairs of devices, over the widest path if there is no direct link."""
        if isinstance(self.links, MatrixLinks):
            return DensePairs(self.bandwidth, self.latency)
        levels = _levels(self.links)
        groups = np.zeros((len(levels) + 1, len(self.devices)), dtype=np.int64)
        groups[0] = np.arange(len(self.devices))
        for row, (members, _) in zip(groups[1:-1], levels, strict=False):
            for number, group in enumerate(members):
                row[[self.index[name] for name in group]] = number
        links = [link for _, link in levels]
        return NestedPairs(
            groups,
            np.array([link.bandwidth_bytes_per_second for link in links]),
            np.array([link.latency_seconds for link in links]),
        )

    @cached_property
    def direct_bandwidth(self) -> Floats:
        """Bandwidth of the direct links in bytes/s, shape (V, V); 0 where there is none."""
        if isinstance(self.links, MatrixLinks):
            return self._matrix(self.links.bandwidth_bytes_per_second)
        return np.where(np.eye(len(self.devices), dtype=bool), 0.0, self.bandwidth)

    @cached_property
    def direct_latency(self) -> Floats:
        """Latency of the links in seconds, shape (V, V); 0 on the diagonal."""
        if isinstance(self.links, MatrixLinks):
            return self._matrix(self.links.latency_seconds)
        return self.latency

    @cached_property
    def bandwidth(self) -> Floats:
        """Bandwidth in bytes/s from i to j over the widest path, shape (V, V); inf for i = j.

        For few pairs, or one number of many, see :attr:`pairs`.
        """
        return self._paths[0]

    @cached_property
    def latency(self) -> Floats:
        """Latency in seconds along the widest path, shape (V, V); 0 for i = j."""
        return self._paths[1]

    @cached_property
    def _paths(self) -> tuple[Floats, Floats]:
        if isinstance(self.links, ServerLinks):
            every = range(len(self.devices))
            return self.pairs.block(every, every)
        return _widest_paths(self.direct_bandwidth, self.direct_latency)

    def digest(self) -> str:
        """A SHA-256 of the cluster's document."""
        return hashlib.sha256(documents.to_json(self).encode()).hexdigest()

    def _matrix(self, value: float | Sequence[Sequence[float | None]]) -> Floats:
        """A field of the links as a matrix with a zero diagonal."""
        size = len(self.devices)
        rows = value if isinstance(value, tuple) else np.full((size, size), value)
        matrix: Floats = np.nan_to_num(np.array(rows, dtype=float))  # None, no link, is 0
        np.fill_diagonal(matrix, 0.0)
        return matrix


def uniform_servers(
    servers: int,
    devices_per_server: int,
    intra: Link,
    inter: Link | None = None,
    *,
    kind: str = "v100",
    memory_bytes: float = 16e9,
    peak_flops: float | None = None,
    name: str | None = None,
) -> Cluster:
    """A cluster of ``servers`` x ``devices_per_server`` equal devices named s0g0, s0g1, ..."""
    require_count(servers, "the number of servers", MAX_DEVICES)
    require_count(devices_per_server, "the number of devices per server", MAX_DEVICES)
    require_count(servers * devices_per_server, "the number of devices", MAX_DEVICES)
    names = [[f"s{s}g{g}" for g in range(devices_per_server)] for s in range(servers)]
    return Cluster(
        name or f"{servers}x{devices_per_server}",
        tuple(Device(id_, kind, memory_bytes, peak_flops) for row in names for id_ in row),
        ServerLinks(tuple(tuple(row) for row in names), intra, inter),
    )


def from_matrix(
    devices: Sequence[Device],
    bandwidth: Sequence[Sequence[float | None]] | Floats,
    latency: float | Sequence[Sequence[float]] = 0.0,
    *,
    servers: Sequence[Sequence[str]] | None = None,
    name: str = "matrix",
    all_reduce_share: float | None = None,
    message_seconds: float | None = None,
    message_bytes_per_second: float | None = None,
) -> Cluster:
    """A cluster of arbitrary links; ``bandwidth[i][j]`` in bytes/s, None where there is none."""
    rows = tuple(
        tuple(None if i == j or entry is None else float(entry) for j, entry in enumerate(row))
        for i, row in enumerate(bandwidth)
    )
    fixed_latency = (
        float(latency)
        if isinstance(latency, float | int)
        else tuple(tuple(float(entry) for entry in row) for row in latency)
    )
    grouped = None if servers is None else tuple(tuple(server) for server in servers)
    links = MatrixLinks(rows, fixed_latency, grouped)
    return Cluster(
        *(name, tuple(devices), links, all_reduce_share),
        *(message_seconds, message_bytes_per_second),
    )


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster document; raises InputError, with one line, if it is not valid."""
    return documents.read(Cluster, path)


def save_cluster(cluster: Cluster, path: str | os.PathLike[str]) -> None:
    """Write a cluster document atomically."""
    documents.write(Cluster, cluster, path)


def _levels(links: ServerLinks) -> list[tuple[Sequence[Sequence[str]], Link]]:
    """The groups of devices and their links, from the servers to the group of all devices."""
    inside: list[tuple[Sequence[Sequence[str]], Link]] = [(links.servers, links.intra)]
    inter = links.inter or links.intra
    if links.racks is None:
        return [*inside, ((), inter)]
    return [*inside, (links.racks, inter), ((), links.inter_rack or inter)]


def _require_cover(field: str, groups: Sequence[Sequence[str]], names: Sequence[str]) -> None:
    """Every device is in exactly one server or rack, and every name in one is a device."""
    known, listed = {*names}, set[str]()
    for name in (name for group in groups for name in group):
        if name not in known:
            raise InputError(f"links.{field} names {name!r}, which is not a device")
        if name in listed:
            raise InputError(f"links.{field} names {name!r} twice")
        listed.add(name)
    for name in names:
        if name not in listed:
            raise InputError(f"device {name!r} is in no {field[:-1]} of links.{field}")


def _require_levels(cluster: str, links: ServerLinks, names: Sequence[str]) -> None:
    """The devices of a server are in one rack, and there is a link for every level."""
    racks = [names] if links.racks is None else [rack for rack in links.racks if rack]
    if links.racks is not None:
        _require_cover("racks", racks, names)
    elif links.inter_rack is not None:
        raise InputError("links.inter_rack is given without links.racks: list each rack's devices")
    rack_of = {name: number for number, rack in enumerate(racks) for name in rack}
    for server in links.servers:
        if len({rack_of[name] for name in server}) > 1:
            raise InputError(f"the server of {server[0]!r} is in several racks of links.racks")
    if len(links.servers) > len(racks) and links.inter is None:
        raise InputError(f"cluster {cluster!r} is not connected: several servers and no inter link")
    if len(racks) > 1 and links.inter_rack is None:
        raise InputError(
            f"cluster {cluster!r} is not connected: several racks and no inter_rack link"
        )


def _require_matrix(links: MatrixLinks, names: Sequence[str]) -> None:
    size = len(names)
    matrices: list[tuple[str, Sequence[Sequence[float | None]]]] = [
        ("bandwidth_bytes_per_second", links.bandwidth_bytes_per_second)
    ]
    if isinstance(links.latency_seconds, tuple):
        matrices.append(("latency_seconds", links.latency_seconds))
    else:
        require_amount(links.latency_seconds, "links.latency_seconds")
    for field, matrix in matrices:
        if len(matrix) != size or any(len(row) != size for row in matrix):
            raise InputError(f"links.{field} must have {size} rows of {size} entries")
        for (i, j), entry in np.ndenumerate(np.array(matrix, dtype=object)):
            if i != j and entry is not None:
                _require_entry(field, entry, f"links.{field}[{i}][{j}] ({names[i]} to {names[j]})")


def _require_message_price(seconds: float | None, bytes_per_second: float | None) -> None:
    if seconds is not None:
        require_amount(seconds, "message_seconds")
    if bytes_per_second is not None:
        require_bandwidth(bytes_per_second, "message_bytes_per_second")
        if seconds is None:
            raise InputError("message_bytes_per_second needs message_seconds, which may be 0")


def _require_entry(field: str, entry: float, place: str) -> None:
    if field == "latency_seconds":
        require_amount(entry, place)
    elif entry == 0:
        raise InputError(f"{place} is zero; write null where there is no link")
    else:
        require_bandwidth(entry, place)


def _require_connected(cluster: Cluster) -> None:
    cut = np.argwhere(cluster.bandwidth == 0)
    if len(cut):
        source, target = (cluster.devices[i].name for i in cut[0])
        raise InputError(
            f"cluster {cluster.name!r} is not connected: no path of links from "
            f"{source!r} to {target!r}"
        )


def _widest_paths(direct: Floats, latency: Floats) -> tuple[Floats, Floats]:
    """Bottleneck bandwidth and summed latency of the widest path between every two devices.

    Pairs with a direct link use it; the others use Floyd-Warshall over (max, min). Of several
    widest paths it is the one of least latency, whatever the order of the devices.
    """
    linked = direct > 0
    np.fill_diagonal(linked, True)
    own = direct.copy()
    np.fill_diagonal(own, np.inf)
    if linked.all():
        return own, latency
    wide, delay = own.copy(), latency.copy()
    for via in range(len(direct)):
        np.maximum(wide, np.minimum.outer(wide[:, via], wide[via]), out=wide)
    for width in np.unique(wide[~linked]):
        least = np.where(own >= width, latency, np.inf)
        for via in range(len(direct)):
            np.minimum(least, np.add.outer(least[:, via], least[via]), out=least)
        relayed = ~linked & (wide == width)
        delay[relayed] = least[relayed]
    return np.where(linked, own, wide), delay
