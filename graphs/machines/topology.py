"""Build clusters of known machines and from text descriptions."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_DEVICES, parse_bandwidth, require_count
from stagewright.graphs.machines.cluster import Cluster, Device, Link, ServerLinks, from_matrix
from stagewright.graphs.machines.devices import Accelerator, kind_of_device
from stagewright.graphs.machines.networks import SERVER_LATENCY, SERVER_SHARE, nvlink_rate

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

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # nvidia-smi underlines the header
_GPU = re.compile(r"GPU\d+")
_NIC = re.compile(r"^\s*(NIC\d+):\s*(\S+)", re.MULTILINE)  # a line of the legend
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
    name: str | None = None,
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
        name or "x".join(map(str, shape)),
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


def parse_nvidia_smi(
    text: str,
    *,
    place: str = "nvidia-smi topo -m",
    pcie: int = 3,
    paths: Mapping[str, float] | None = None,
    latency: float = SERVER_LATENCY,
    kind: str | Accelerator = "v100",
    memory_bytes: float | None = None,
    name: str = "nvidia-smi",
) -> Cluster:
    """A cluster of one server from the text that ``nvidia-smi topo -m`` prints.

    Network cards are columns like NIC0, which the legend names, or like mlx5_0; ``source`` lists
    them. CPU affinities are ignored.

    Raises InputError in one line that names the row and column, or if there is no such generation
    or path.

    Parameters
    ----------
    text
        The output.
    place
        Starts every message, for example a file name.
    pcie
        Generation of PCIe, 3 to 5: the paths have the rates of ``PCIE_PATHS``. One NVLink has that
        of the kind, as collectives reach it; ``NV2`` is two of them.
    paths
        Bytes/s of paths that are known better.
    latency
        Seconds per transfer.
    kind, memory_bytes
        The devices' kind, and their memory (default: from the table in ``devices``).
    name
        Name of the cluster.
    """
    if pcie not in PCIE_PATHS:
        raise InputError(f"pcie must be one of {', '.join(map(str, PCIE_PATHS))}, got {pcie!r}")
    columns, links = _smi_links(text, place)
    names = [column for column in columns if _GPU.fullmatch(column)]
    joins = _distinct(links)
    given = {} if paths is None else paths
    unused = sorted(given.keys() - joins)
    if unused:
        raise InputError(f"{place}: no GPUs are joined by {unused[0]}, only by {', '.join(joins)}")
    every = {link: _smi_rate(link, kind, pcie, given) for link in joins}
    rows = [[None if link == "X" else every[link][0] for link in row] for row in links]
    stated = [f"{link} at {rate / 1e9:.4g} GB/s{why}" for link, (rate, why) in every.items()]
    source = "; ".join([place, *stated, *_network_cards(text, columns)])
    made = from_matrix(
        _devices(names, kind, memory_bytes), rows, latency, servers=[names], name=name
    )
    return replace(made, source=source)


def nvidia_smi_paths(text: str, place: str) -> tuple[str, ...]:
    """How GPUs are joined in the text of ``nvidia-smi topo -m``, such as ``NV18`` or ``SYS``.

    Raises InputError as of :func:`parse_nvidia_smi`.
    """
    return _distinct(_smi_links(text, place)[1])


def _distinct(links: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(sorted({link for row in links for link in row} - {"X"}))


def _network_cards(text: str, columns: Sequence[str]) -> list[str]:
    """The network cards, by the names of the legend, as one phrase if there are any."""
    legend = dict(_NIC.findall(text))
    cards = [legend.get(one, one) for one in columns if not _GPU.fullmatch(one)]
    return [f"network cards {', '.join(cards)}"] if cards else []


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


def _smi_links(text: str, place: str) -> tuple[list[str], list[list[str]]]:
    """The columns, and how every GPU is joined to every GPU."""
    columns, table = _smi_table(text, place)
    names = [column for column in columns if _GPU.fullmatch(column)]
    links = [[_smi_entry(table, columns, a, b, place) for b in names] for a in names]
    for i, row in enumerate(links):
        for j, link in enumerate(row):
            if link != links[j][i]:
                raise InputError(
                    f"{place}: {names[i]} to {names[j]} is {link}, back it is {links[j][i]}"
                )
    return columns, links


def _smi_table(text: str, place: str) -> tuple[list[str], dict[str, list[str]]]:
    """The column names before the affinities, and the entries of each row below them."""
    lines = [line.split() for line in _ESCAPES.sub("", text).splitlines()]
    header = next((i for i, line in enumerate(lines) if line and _GPU.fullmatch(line[0])), None)
    if header is None or "X" in lines[header]:
        raise InputError(f"{place}: no header of GPU0, GPU1, ...; paste the whole output")
    columns = []
    for word in lines[header]:
        if word in ("CPU", "NUMA", "GPU"):  # "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"
            break
        columns.append(word)
    rows = {line[0]: line[1:] for line in lines[header + 1 :] if line and line[0] in columns}
    return columns, rows


def _smi_entry(
    table: Mapping[str, Sequence[str]], columns: Sequence[str], a: str, b: str, place: str
) -> str:
    if a not in table:
        raise InputError(f"{place}: the row of {a} is missing; paste the whole output")
    column = columns.index(b)
    if len(table[a]) <= column:
        raise InputError(f"{place}: the row of {a} ends before the column of {b}")
    link = table[a][column]
    if (link == "X") != (a == b) or not re.fullmatch(rf"X|NV[1-9]\d*|{'|'.join(PATHS)}", link):
        raise InputError(f"{place}: {a} to {b}: {link!r} is none of NV#, {', '.join(PATHS)}")
    return link


def _smi_rate(
    link: str, kind: str | Accelerator, pcie: int, given: Mapping[str, float]
) -> tuple[float, str]:
    """Bytes/s between GPUs that ``link`` joins, and in brackets its source if not ``given``."""
    if link in given:
        return given[link], ""
    if not link.startswith("NV"):
        return PCIE_PATHS[pcie][link], f" (PCIe {pcie})"
    rate = int(link[2:]) * nvlink_rate(kind)
    return rate, f" ({SERVER_SHARE:.1%} of {rate / SERVER_SHARE / 1e9:.4g})"
