"""Build clusters of known machines and from text descriptions."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_DEVICES, parse_bandwidth, require_count
from stagewright.graphs.machines.cluster import Cluster, Device, Link, ServerLinks, from_matrix
from stagewright.graphs.machines.devices import Accelerator, kind_of_device, known_kind
from stagewright.graphs.machines.networks import (
    SERVER_LATENCY,
    SERVER_SHARE,
    nvlink_rate,
    server_link,
)

# What NCCL 2.30 assumes that GPUs reach: 60, 120 and 240 (x 100 Mb/s) of each of 16 lanes
# (src/graph/topo.cc, kvDictPciGen), a sixth of it lost through an Intel CPU (INTEL_P2P_OVERHEAD of
# src/graph/topo.h), and between CPUs what is there of Broadwell, AMD, and Sapphire Rapids.
_PCIE = {3: (12e9, 10e9, 6e9), 4: (24e9, 20e9, 16e9), 5: (48e9, 40e9, 22e9)}

PCIE_PATHS: dict[int, dict[str, float]] = {
    generation: {
        "PIX": switch,  # one PCIe switch
        "PXB": switch,  # several PCIe switches
        "PHB": bridge,  # a PCIe host bridge, that is the CPU
        "NODE": bridge,  # the host bridges of one NUMA node
        "SYS": between,  # the link between CPUs
        "SOC": between,  # the same, of old drivers
    }
    for generation, (switch, bridge, between) in _PCIE.items()
}
"""Bytes per second and direction that GPUs reach over the paths that ``nvidia-smi topo -m`` names,
by the generation of PCIe, with 16 lanes."""

PATHS = tuple(PCIE_PATHS[3])

# NVLinks between the GPUs of a DGX-1 V100 (hybrid cube mesh; six per GPU).
_DGX1_NVLINKS = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)

_NO_LINK = ("-", "x", "none", "null")


def dgx1(
    *,
    brick: float = nvlink_rate("v100"),
    pcie: float = PCIE_PATHS[3]["SYS"],
    latency: float = SERVER_LATENCY,
    kind: str | Accelerator = "v100",
    memory_bytes: float | None = None,
    name: str = "dgx1",
) -> Cluster:
    """A DGX-1 with eight V100: the hybrid cube mesh of NVLinks, PCIe between the other pairs.

    ``brick``: Bytes/s per direction that one NVLink reaches; pairs have one or two of them.
    ``pcie``: Bytes/s between GPUs without an NVLink, which are attached to different CPUs.
    ``latency``: seconds per transfer. ``kind``, ``memory_bytes``: the devices' kind, and their
    memory (default: from the table in ``devices``). ``name``: name of the cluster.
    """
    names = [f"g{i}" for i in range(8)]
    rows = [[links * brick if links else pcie for links in row] for row in _DGX1_NVLINKS]
    devices = _devices(names, kind, memory_bytes)
    return from_matrix(devices, rows, latency, servers=[names], name=name)


def uniform_racks(
    racks: int,
    servers_per_rack: int,
    devices_per_server: int,
    links: tuple[Link, Link, Link],
    *,
    kind: str = "v100",
    memory_bytes: float = 16e9,
    peak_flops: float | None = None,
) -> Cluster:
    """A cluster of racks of servers of equal devices named r0s0g0, r0s0g1, ...

    ``links`` are those inside a server, between the servers of a rack, and between racks.
    """
    shape = (racks, servers_per_rack, devices_per_server)
    for count, what in zip(shape, ("racks", "servers per rack", "devices per server"), strict=True):
        require_count(count, f"the number of {what}", MAX_DEVICES)
    require_count(math.prod(shape), "the number of devices", MAX_DEVICES)
    names = [
        [tuple(f"r{r}s{s}g{g}" for g in range(shape[2])) for s in range(shape[1])]
        for r in range(shape[0])
    ]
    servers = tuple(server for rack in names for server in rack)
    return Cluster(
        "x".join(map(str, shape)),
        tuple(Device(id_, kind, memory_bytes, peak_flops) for server in servers for id_ in server),
        ServerLinks(servers, *links[:2], tuple(tuple(chain(*rack)) for rack in names), links[2]),
    )


def read_matrix(
    path: str | os.PathLike[str],
    *,
    latency: float = 0.0,
    kind: str | Accelerator = "v100",
    memory_bytes: float | None = None,
    name: str | None = None,
) -> Cluster:
    """A cluster from a text file of bandwidths: entry j of row i is that from device i to j.

    Entries have a unit (``12GB/s``, ``100Gb/s``) and are separated by commas or spaces; ``-`` or
    ``x`` means no link. The diagonal is ignored. Lines that start with ``#`` are skipped. A first
    line of names gives the device names (default: g0, g1, ...); the rows may then start with names
    too. Raises InputError in one line with file, line and column.
    """
    lines = [
        (f"{path}:{number}", _split(line))
        for number, line in enumerate(documents.read_text(path).splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        raise InputError(f"{path}: no rows of bandwidths")
    names = [f"g{i}" for i in range(len(lines))]
    if all(_is_name(entry) for entry in lines[0][1]):
        names = lines.pop(0)[1]
        lines = [(place, _without_name(entries, names)) for place, entries in lines]
    if len(lines) != len(names):
        raise InputError(f"{path}: {len(lines)} rows for {len(names)} devices")
    rows = [_parse_row(entries, names, i, place) for i, (place, entries) in enumerate(lines)]
    title = name or Path(path).stem
    return from_matrix(_devices(names, kind, memory_bytes), rows, latency, name=title)


@dataclass(frozen=True, slots=True)
class Listed:
    """Equal servers as a tool lists them; a list of network cards alone has no ``devices``.

    ``links`` has, for every two devices of a server, the name of the path that joins them, such as
    ``NV18`` or ``SYS``; ``-`` is no direct link. None if the tool lists no links.
    ``path_bytes_per_second`` has the rates of paths that the tool gives, ``card_bytes_per_second``
    those of a server's network cards. ``kind`` is what the tool calls the devices, ``domain`` the
    name of the NVLink domain that servers share.
    """

    place: str
    devices: tuple[str, ...] = ()
    links: tuple[tuple[str, ...], ...] | None = None
    servers: int = 1
    kind: str | None = None
    domain: str = ""
    cards: tuple[str, ...] = ()
    card_bytes_per_second: tuple[float, ...] = ()
    path_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    pcie: int | None = None
    lists_pcie_only: bool = False
    notes: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The names of the paths between devices."""
        return tuple(sorted({path for row in self.links or () for path in row} - {"X", "-"}))

    @property
    def source(self) -> str:
        """The tool's file, and what it lists besides links, for the source of a cluster."""
        cards = [f"network cards {', '.join(self.cards)}"] if self.cards else []
        return "; ".join([self.place, *cards, *self.notes])


def server_of(
    listed: Listed,
    *,
    pcie: int | None = None,
    paths: Mapping[str, float] | None = None,
    latency: float = SERVER_LATENCY,
    kind: str | Accelerator = "v100",
    memory_bytes: float | None = None,
    name: str = "listed",
) -> Cluster:
    """A cluster of one of the servers that a tool lists with its links.

    Raises InputError in one line if there is no such generation or path, or a path has no rate.

    Parameters
    ----------
    listed
        The servers.
    pcie
        Generation of PCIe, 3 to 5: the paths have the rates of ``PCIE_PATHS``; default: that of the
        list, else 3. One NVLink has that of the kind, as collectives reach it; ``NV2`` is two of
        them.
    paths
        Bytes/s of paths that are known better.
    latency
        Seconds per transfer.
    kind, memory_bytes
        The devices' kind, and their memory (default: from the table in ``devices``).
    name
        Name of the cluster.
    """
    pcie = pcie or listed.pcie or 3
    if pcie not in PCIE_PATHS:
        raise InputError(f"pcie must be one of {', '.join(map(str, PCIE_PATHS))}, got {pcie!r}")
    given = {} if paths is None else paths
    unused = sorted(given.keys() - set(listed.paths))
    if unused:
        raise InputError(
            f"{listed.place}: no GPUs are joined by {unused[0]}, only by {', '.join(listed.paths)}"
        )
    every = {path: _path_rate(path, listed, kind, pcie, given) for path in listed.paths}
    rows = [
        [every[path][0] if path in every else None for path in row] for row in listed.links or ()
    ]
    stated = [f"{path} at {rate / 1e9:.4g} GB/s{why}" for path, (rate, why) in every.items()]
    made = from_matrix(
        _devices(listed.devices, kind, memory_bytes),
        rows,
        latency,
        servers=[listed.devices],
        name=name,
    )
    first, *rest = listed.source.split("; ")
    return replace(made, source="; ".join([first, *stated, *rest]))


def _path_rate(
    path: str, listed: Listed, kind: str | Accelerator, pcie: int, given: Mapping[str, float]
) -> tuple[float, str]:
    """Bytes/s between GPUs that ``path`` joins, and in brackets its source if not ``given``."""
    if path in given:
        return given[path], ""
    if path in PATHS:
        return PCIE_PATHS[pcie][path], f" (PCIe {pcie})"
    if path in listed.path_bytes_per_second:
        rate = SERVER_SHARE * listed.path_bytes_per_second[path]
    elif path.startswith("NV"):
        rate = int(path[2:]) * nvlink_rate(kind)
    else:
        card = known_kind(kind)
        link = None if card is None else server_link(card)
        if link is None:
            raise InputError(
                f"{listed.place}: the rate of {path} is not known; give the kind, for example "
                f"--device mi300x, or --intra {path}=64GB/s"
            )
        rate = link.bandwidth_bytes_per_second
    return rate, f" ({SERVER_SHARE:.1%} of {rate / SERVER_SHARE / 1e9:.4g})"


def _devices(
    names: Sequence[str], kind: str | Accelerator, memory_bytes: float | None
) -> list[Device]:
    return [Device(name, *kind_of_device(kind, memory_bytes)) for name in names]


def _split(line: str) -> list[str]:
    if "," in line:
        return [entry.strip() for entry in line.split(",")]
    return line.split()


def _is_name(entry: str) -> bool:
    return entry[:1].isalpha() and entry.lower() not in (*_NO_LINK, "nan", "inf")


def _without_name(entries: list[str], names: Sequence[str]) -> list[str]:
    return entries[1:] if len(entries) == len(names) + 1 and entries[0] in names else entries


def _parse_row(
    entries: Sequence[str], names: Sequence[str], i: int, place: str
) -> list[float | None]:
    if len(entries) != len(names):
        raise InputError(f"{place}: {len(entries)} entries for {len(names)} devices")
    row: list[float | None] = []
    for j, entry in enumerate(entries):
        if i == j or entry.lower() in _NO_LINK:
            row.append(None)
            continue
        row.append(parse_bandwidth(entry, f"{place}: {names[i]} to {names[j]}:"))
    return row
