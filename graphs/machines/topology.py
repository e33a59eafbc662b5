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
from stagewright.graphs.machines.devices import (
    ACCELERATORS,
    NVLINK,
    Accelerator,
    kind_of_device,
)

PATH_BANDWIDTH: dict[str, float] = {
    "PIX": 12e9,  # one PCIe switch
    "PXB": 12e9,  # several PCIe switches
    "PHB": 10e9,  # a PCIe host bridge, that is the CPU
    "NODE": 10e9,  # the host bridges of one NUMA node
    "SYS": 6e9,  # the link between CPUs
    "SOC": 6e9,  # the same, of old drivers
}
"""Bytes per second and direction over the paths that ``nvidia-smi topo -m`` names.

Rates that NCCL assumes (src/graph/topo.h): PCIe 3.0 x16 at 12 GB/s, a fifth more traffic through
an Intel CPU, 6 GB/s between Broadwell CPUs. Newer machines are faster; pass their rates.
"""

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
    brick: float = NVLINK,
    pcie: float = PATH_BANDWIDTH["SYS"],
    latency: float = 0.0,
    kind: str | Accelerator = "v100",
    memory_bytes: float | None = None,
    name: str = "dgx1",
) -> Cluster:
    """A DGX-1 with eight V100: the hybrid cube mesh of NVLinks, PCIe between the other pairs.

    Parameters
    ----------
    brick
        Bytes/s per direction of one NVLink; pairs have one or two of them.
    pcie
        Bytes/s between GPUs without an NVLink, which are attached to different CPUs.
    latency
        Seconds per transfer.
    kind, memory_bytes
        The devices' kind, and their memory (default: from the table in ``devices``).
    name
        Name of the cluster.
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

    Entries are bytes/s (``12e9``) or have a unit (``12GB/s``), separated by commas or spaces;
    ``-`` or ``x`` means no link. The diagonal is ignored. Lines that start with ``#`` are skipped.
    A first line of names gives the device names (default: g0, g1, ...); the rows may then start
    with names too.

    Raises
    ------
    InputError
        One line with file, line and column.
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
    brick: float | None = None,
    paths: Mapping[str, float] = PATH_BANDWIDTH,
    latency: float = 0.0,
    kind: str | Accelerator = "v100",
    memory_bytes: float | None = None,
    name: str = "nvidia-smi",
) -> Cluster:
    """A cluster of one server from the text that ``nvidia-smi topo -m`` prints.

    Network cards are columns like NIC0, which the legend names, or like mlx5_0; ``source`` lists
    them. CPU affinities are ignored.

    Parameters
    ----------
    text
        The output.
    place
        Starts every message, for example a file name.
    brick
        Bytes/s per direction of one NVLink (default: that of the kind): ``NV2`` is two of them.
    paths
        Bytes/s of the other paths; the default is ``PATH_BANDWIDTH``.
    latency
        Seconds per transfer.
    kind, memory_bytes
        The devices' kind, and their memory (default: from the table in ``devices``).
    name
        Name of the cluster.

    Raises
    ------
    InputError
        One line that names the row and column.
    """
    unknown = sorted(paths.keys() - PATH_BANDWIDTH.keys())
    if unknown:
        raise InputError(
            f"{unknown[0]!r} is not a path of nvidia-smi ({', '.join(PATH_BANDWIDTH)})"
        )
    columns, table = _smi_table(text, place)
    names = [column for column in columns if _GPU.fullmatch(column)]
    links = [[_smi_entry(table, columns, a, b, place) for b in names] for a in names]
    bandwidths = {**PATH_BANDWIDTH, **paths}
    rate = _nvlink(kind) if brick is None else brick
    rows = []
    for i, row in enumerate(links):
        for j, link in enumerate(row):
            if link != links[j][i]:
                raise InputError(
                    f"{place}: {names[i]} to {names[j]} is {link}, back it is {links[j][i]}"
                )
        rows.append(
            [None if link == "X" else _smi_bandwidth(link, rate, bandwidths) for link in row]
        )
    devices = _devices(names, kind, memory_bytes)
    kinds = sorted({link for row in links for link in row} - {"X"})
    stated = [f"{one} at {_smi_bandwidth(one, rate, bandwidths) / 1e9:g} GB/s" for one in kinds]
    source = "; ".join([place, *stated, *_network_cards(text, columns)])
    made = from_matrix(devices, rows, latency, servers=[names], name=name)
    return replace(made, source=source)


def _nvlink(kind: str | Accelerator) -> float:
    """Bytes/s per direction of one NVLink of a kind."""
    card = ACCELERATORS.get(kind.lower()) if isinstance(kind, str) else kind
    return NVLINK if card is None else card.nvlink_bytes_per_second


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
        try:
            row.append(parse_bandwidth(entry))
        except InputError as error:
            raise InputError(f"{place}: {names[i]} to {names[j]}: {error}") from None
    return row


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
    if (link == "X") != (a == b) or not re.fullmatch(
        rf"X|NV[1-9]\d*|{'|'.join(PATH_BANDWIDTH)}", link
    ):
        raise InputError(
            f"{place}: {a} to {b}: {link!r} is none of NV#, {', '.join(PATH_BANDWIDTH)}"
        )
    return link


def _smi_bandwidth(link: str, brick: float, bandwidths: Mapping[str, float]) -> float:
    return int(link[2:]) * brick if link.startswith("NV") else bandwidths[link]
