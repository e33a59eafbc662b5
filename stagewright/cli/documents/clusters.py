"""From the options of ``cluster`` to the cluster, with what was assumed as its source."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.cli.documents.machines import (
    ClusterOptions,
    DescribedKind,
    cards_of,
    read_kinds,
    with_host,
    with_source,
)
from stagewright.cli.options import read_by_kind, read_groups
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import parse_bandwidth

if TYPE_CHECKING:
    from stagewright.graphs.machines.cluster import Cluster, Link
    from stagewright.graphs.machines.fabric import ServerGroup
    from stagewright.graphs.machines.topology import Listed

_SHAPE = re.compile(r"(\d+[xX])?\d+[xX]\d+")
_RACKS = re.compile(r"\d+[xX]\d+[xX]\d+")
_COUNT = re.compile(r"\d{1,9}")
_COUNTS = re.compile(r"\d{1,9}|[^:,]+:\d{1,9}(,[^:,]+:\d{1,9})*")


def read_cluster(options: ClusterOptions) -> "Cluster":
    """The cluster of the options.

    Raises
    ------
    InputError
        If an option is missing, is not valid or does not belong to the others.
    """
    named = [options.matrix is not None, bool(options.listings), options.dgx1]
    shape = options.shape or ""
    counts = _COUNTS.fullmatch(shape) if options.listings else _COUNT.fullmatch(shape)
    if sum(named) > 1 or not (shape or any(named)) or (shape and any(named) and counts is None):
        raise InputError(
            "give one of: a shape such as 8x4 or a100:2x4,v100:3x8; --matrix, --from, --dgx1 "
            "(with a number of such servers, for example 4, if there are several)"
        )
    over = options.oversubscription is not None
    if (over or options.gives("inter_rack")) and _RACKS.fullmatch(shape) is None:
        raise InputError(
            "--inter-rack, --latency-inter-rack and --oversubscription belong to a shape such as "
            "4x8x4"
        )
    if over and options.inter_rack is not None:
        raise InputError("--oversubscription says what --inter-rack says; give one of them")
    if options.pcie is not None and not options.listings:
        raise InputError("--pcie belongs to --from FILE, whose paths have its rates")
    if options.listings:
        return _of_listings(options, options.listings)
    if options.describes_server:
        return _of_server(options)
    return _of_kinds(options, shape) if ":" in shape else _of_shape(options, shape)


def _of_server(options: ClusterOptions) -> "Cluster":
    """One server of a matrix or of a name, or several of it."""
    from stagewright.graphs.machines import topology
    from stagewright.graphs.machines.fabric import mixed_servers, repeated

    if options.bandwidth.intra:
        raise InputError(
            "--intra belongs to a shape such as 8x4, or to --from FILE: the server's links are "
            "given"
        )
    kind = read_kinds([options.device or ("v100" if options.dgx1 else None)], options)[0]
    every = _of_device(kind, options)
    made = (
        topology.dgx1(**every)
        if options.matrix is None
        else topology.read_matrix(options.matrix, **every)
    )
    made = with_host(made, kind.device.host_bytes_per_second)
    if options.shape is not None:
        servers = int(options.shape)
        group = repeated(made, servers, kind.link("inter", len(made)))
        made = mixed_servers([group], f"{servers} x {made.name}")
    else:
        _refuse_network(options)
    return with_source(made, [kind])


def _refuse_network(options: ClusterOptions) -> None:
    if options.gives("inter"):
        raise InputError(
            "--inter and --latency-inter belong to a shape such as 8x4, or to a number of servers, "
            "for example 4 --from topo.txt"
        )


def _of_device(kind: DescribedKind, options: ClusterOptions) -> dict[str, Any]:
    """The devices and latency of a server that a file or a name describes."""
    every: dict[str, Any] = {"kind": kind.kind, "memory_bytes": kind.device.memory_bytes}
    if options.latency.intra is not None:
        every["latency"] = options.latency.intra
    return every


def _of_listings(options: ClusterOptions, files: Sequence[Path]) -> "Cluster":
    """The servers that tools' outputs list."""
    from stagewright.graphs.importers.machine_lists import listed_machines, with_cards
    from stagewright.graphs.machines.fabric import ServerGroup, mixed_servers, repeated

    read = [one for file in files for one in listed_machines(documents.read_text(file), str(file))]
    counted = _counted(options.shape, with_cards(read))
    listings = [_with_known_links(*one, options.device) for one in counted]
    by_path = [one for one, _ in listings if one.links is not None]
    # The bandwidths inside are those of paths where a tool lists them, not of kinds.
    rest = options.model_copy(update={"intra": None}) if by_path else options
    kinds = read_kinds([kind for _, kind in listings], rest)
    paths = _paths(options.bandwidth.intra if by_path else None, by_path)
    sizes = [_sizes(one, kind) for (one, _), kind in zip(listings, kinds, strict=True)]
    total = sum(servers for of_kind in sizes for _, servers in of_kind)
    if total == 1:
        _refuse_network(options)
    groups: list[ServerGroup] = []
    sources: list[str | None] = []
    for (one, _), kind, of_kind in zip(listings, kinds, sizes, strict=True):
        inter = kind.link("inter", len(one.devices), cards_of(one)) if total > 1 else None
        if one.links is None:
            groups += [
                ServerGroup(kind.devices(devices), servers, kind.link("intra"), inter)
                for devices, servers in of_kind
            ]
            sources.append(one.source)
            continue
        server = _server(one, kind, options, paths)
        if total == 1:
            return with_source(server, [kind])
        groups.append(repeated(server, one.servers, inter))
        sources.append(server.source)
    names = [f"{one.servers} x {Path(one.place).stem}" for one, _ in listings]
    source = "; ".join(filter(None, dict.fromkeys(sources)))
    return with_source(mixed_servers(groups, ", ".join(names), source), kinds)


def _counted(shape: str | None, listings: "list[Listed]") -> "list[tuple[Listed, str | None]]":
    """The servers, as many as ``shape`` says, and their kinds if it names them."""
    if shape is None:
        return [(one, None) for one in listings]
    given = [part.rpartition(":") for part in shape.split(",")]
    if len(given) != len(listings):
        raise InputError(f"{shape!r} says {len(given)} kinds of servers, the files {len(listings)}")
    for one in listings:
        if one.links is None:
            raise InputError(f"{one.place} lists how many servers there are; leave {shape} out")
    return [
        (replace(one, servers=int(count)), kind or None)
        for one, (kind, _, count) in zip(listings, given, strict=True)
    ]


def _with_known_links(
    one: "Listed", kind: str | None, device: str | None
) -> "tuple[Listed, str | None]":
    """The servers and the name of their kind; without links if the kind's are faster than listed.

    Raises InputError if the kind is not known and not given.
    """
    from stagewright.graphs.machines.devices import MOST_PCIE, kind_named, known_kind, read_kind

    kind = kind or device or (one.kind and kind_named(one.kind))
    if kind is None and (one.kind is not None or one.links is None):
        raise InputError(
            f"{one.place}: {one.kind or 'GPUs without a name'}: no kind of device that is known; "
            "give --device KIND, one of stagewright devices or a JSON file of your own"
        )
    if one.lists_pcie_only and kind is not None:
        card = known_kind(read_kind(kind))
        if card is not None and (card.server_bytes_per_second or 0) > MOST_PCIE:
            note = f"links of {card.name}, of which only PCIe is listed"
            return replace(one, links=None, notes=(*one.notes, note)), kind
    return one, kind


def _sizes(one: "Listed", kind: DescribedKind) -> list[tuple[int, int]]:
    """Devices of a server, and servers; those that an NVLink domain joins are one server."""
    from stagewright.graphs.machines.devices import known_kind

    size, total = len(one.devices), len(one.devices) * one.servers
    card = known_kind(kind.kind)
    if one.links is not None or card is None or card.nvlink_domain <= max(8, size):
        return [(size, one.servers)]
    joined = min(card.nvlink_domain // size * size, total)
    if joined > size:
        kind.facts.append(f"servers of {size} joined to {joined} by NVLink")
    found = [(joined, total // joined), (total % joined, 1)]
    return [(devices, servers) for devices, servers in found if devices]


def _paths(text: str | None, listings: "Sequence[Listed]") -> dict[str, float]:
    """The bandwidths of paths that are given."""
    every = {path for one in listings for path in one.paths}

    def known(path: str, option: str) -> str:
        if path.strip().upper() in every:
            return path.strip().upper()
        raise InputError(
            f"{', '.join(one.place for one in listings)}: no GPUs are joined by "
            f"{path.strip().upper()}, only by {', '.join(sorted(every))}"
        )

    return read_by_kind(text, "--intra", parse_bandwidth, every, known)


def _server(
    one: "Listed", kind: DescribedKind, options: ClusterOptions, paths: dict[str, float]
) -> "Cluster":
    """One of the servers, whose links are listed."""
    from stagewright.graphs.machines.topology import server_of

    given = {path: rate for path, rate in paths.items() if path in one.paths}
    made = server_of(
        one,
        pcie=options.pcie,
        paths=given,
        name=Path(one.place).stem,
        **_of_device(kind, options),
    )
    return with_host(made, kind.device.host_bytes_per_second)


def _of_kinds(options: ClusterOptions, shape: str) -> "Cluster":
    """Servers of several kinds."""
    from stagewright.graphs.machines.fabric import mixed_servers

    if options.device is not None:
        raise InputError(f"--device {options.device}: the shape {shape} names the kinds")
    parts = read_groups(shape, "the shape")
    kinds = read_kinds([kind for kind, _, _ in parts], options)
    total = sum(servers for _, servers, _ in parts)
    groups = [
        _group(kind, servers, devices, total)
        for kind, (_, servers, devices) in zip(kinds, parts, strict=True)
    ]
    shapes = [f"{one.devices[0].kind}:{one.servers}x{len(one.devices)}" for one in groups]
    return with_source(mixed_servers(groups, ",".join(shapes)), kinds)


def _of_shape(options: ClusterOptions, shape: str) -> "Cluster":
    """Equal servers, in racks or not."""
    from stagewright.graphs.machines.cluster import Link
    from stagewright.graphs.machines.fabric import mixed_servers
    from stagewright.graphs.machines.topology import uniform_racks

    if _SHAPE.fullmatch(shape) is None:
        raise InputError(
            f"{shape!r} is no shape; write servers x devices, for example 8x4, racks x servers "
            "x devices, 4x8x4, or servers by kind, a100:2x4,v100:3x8"
        )
    racks, servers, devices = [1, *map(int, shape.lower().split("x"))][-3:]
    kind = read_kinds([options.device], options)[0]
    is_linked = options.bandwidth.inter_rack is not None
    group = _group(kind, servers, devices, servers, is_linked=is_linked)
    between = _between_racks(options, kind, group)
    if between is None:
        if racks > 1:
            raise InputError(
                "--inter-rack is missing: the racks must be connected, e.g. 100Gbps, or say by how "
                "much they share their uplinks, --oversubscription 2"
            )
        return with_source(mixed_servers([group], f"{servers}x{devices}"), [kind])
    inner = group.intra if isinstance(group.intra, Link) else group.inter or between
    device = kind.device
    made = uniform_racks(
        racks, servers, devices, (inner, group.inter or inner, between),
        kind=device.kind, memory_bytes=device.memory_bytes, peak_flops=device.peak_flops,
    )  # fmt: skip
    return with_source(with_host(made, device.host_bytes_per_second), [kind])


def _between_racks(
    options: ClusterOptions, kind: DescribedKind, group: "ServerGroup"
) -> "Link | None":
    """The link between racks, given or as the uplinks of an oversubscribed leaf have it."""
    from stagewright.graphs.machines.cluster import Link

    seconds = options.latency.inter_rack
    if options.bandwidth.inter_rack is not None:
        rate = parse_bandwidth(options.bandwidth.inter_rack, "--inter-rack")
        return Link(rate, seconds or 0.0)
    if options.oversubscription is None:
        return None
    inner = group.inter or kind.link("inter", len(group.devices))
    rate = inner.bandwidth_bytes_per_second / options.oversubscription
    kind.facts.append(f"{rate / 1e9:.4g} GB/s between racks (1 in {options.oversubscription:g})")
    return Link(rate, inner.latency_seconds if seconds is None else seconds)


def _group(
    kind: DescribedKind, servers: int, devices: int, total: int, *, is_linked: bool = False
) -> "ServerGroup":
    """The servers of a kind among ``total`` servers, with the links that they need.

    A single device has a link too, unless it ``is_linked`` to other racks.
    """
    from stagewright.graphs.machines.fabric import ServerGroup

    intra = kind.link("intra") if devices > 1 or kind.intra is not None else None
    inter = kind.link("inter", devices) if total > 1 or kind.network is not None else None
    if intra is None and inter is None and not is_linked:
        intra = kind.link("intra")
    return ServerGroup(kind.devices(devices), servers, intra, inter)
