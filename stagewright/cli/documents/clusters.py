"""From the options of ``cluster`` to the cluster, with what was assumed as its source."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field

from stagewright.cli.layouts.inputs import read_by_kind, read_groups
from stagewright.cli.options import Written
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    format_bytes,
    parse_bandwidth,
    parse_bytes,
    parse_latency,
)
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.graphs.machines.cluster import Cluster, Device, Link
    from stagewright.graphs.machines.devices import Accelerator
    from stagewright.graphs.machines.servers import ServerGroup

T = TypeVar("T")

_SHAPE = re.compile(r"(\d+[xX])?\d+[xX]\d+")
_RACKS = re.compile(r"\d+[xX]\d+[xX]\d+")
_COUNT = re.compile(r"\d{1,9}")

Level = Literal["intra", "inter"]
_WHERE = {"intra": ("inside a server", "100GB/s"), "inter": ("between servers", "12.5GB/s")}


@dataclass(frozen=True, slots=True)
class _ByLevel(Generic[T]):
    """A value inside servers, between the servers of a rack, and between racks."""

    intra: T
    inter: T
    inter_rack: T


class ClusterOptions(Written):
    """What ``cluster`` is asked; latencies are seconds."""

    shape: Annotated[str | None, Option("SHAPE")] = None
    """Servers x devices, for example 8x4; racks x servers x devices, 4x8x4; servers by kind,
    a100:2x4,v100:3x8; or a number of servers, each that of --nvidia-smi, --dgx1 or --matrix."""
    intra: str | None = None
    """Bandwidth inside a server, for example 100GB/s; default: that of the kind. Bandwidths and
    memory may be given by kind: a100=300GB/s,v100=25GB/s; this one, with --nvidia-smi, by path:
    PIX=24GB/s,SYS=16GB/s."""
    inter: str | None = None
    """Bandwidth between servers, for example 12.5GB/s or 100Gbps."""
    device: Annotated[str | None, Option(form="KIND")] = None
    """Kind of device, or the JSON file of your own; default: generic, an A100 in round numbers
    without links."""
    memory: Annotated[str | None, Option(form="SIZE")] = None
    """Memory of a device, for example 16GB; default: that of the kind."""
    host_bandwidth: str | None = None
    """Bandwidth between a device and its host's memory, for example 25GB/s."""
    latency_intra: Annotated[float | None, Option(form="TIME", of_text=parse_latency)] = None
    """Latency inside a server, for example 5us."""
    latency_inter: Annotated[float | None, Option(form="TIME", of_text=parse_latency)] = None
    """Latency between servers, for example 20us."""
    inter_rack: str | None = None
    """Bandwidth between racks, for example 100Gbps."""
    latency_inter_rack: Annotated[float | None, Option(form="TIME", of_text=parse_latency)] = None
    """Latency between racks, for example 50us."""
    matrix: Path | None = None
    """A text file of bandwidths, a row per device."""
    nvidia_smi: Path | None = None
    """The text that nvidia-smi topo -m prints."""
    pcie: Annotated[int | None, Field(ge=3), Field(le=5)] = None
    """With --nvidia-smi: generation of PCIe, 3, 4 or 5; default: 3."""
    dgx1: bool = False
    """Eight V100 in a cube of NVLinks."""

    @property
    def bandwidth(self) -> _ByLevel[str | None]:
        """The bandwidths of links."""
        return _ByLevel(self.intra, self.inter, self.inter_rack)

    @property
    def latency(self) -> _ByLevel[float | None]:
        """The latencies of links."""
        return _ByLevel(self.latency_intra, self.latency_inter, self.latency_inter_rack)

    @property
    def describes_server(self) -> bool:
        """Whether a file, or a name, describes one server."""
        return self.matrix is not None or self.nvidia_smi is not None or self.dgx1

    def gives(self, level: str) -> bool:
        """Whether there is an option of the links of a level."""
        return any(getattr(one, level) is not None for one in (self.bandwidth, self.latency))


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of device with the values that the options give for it.

    ``phrase`` names the kind, ``device`` is one of it, ``facts`` are what was assumed of it.
    """

    kind: "str | Accelerator"
    phrase: str
    device: "Device"
    bandwidth: dict[str, float]
    latency: _ByLevel[float | None]
    facts: list[str]

    def link(self, level: Level) -> "Link":
        """The link that is given, or that of the kind."""
        from stagewright.graphs.machines.cluster import Link

        seconds: float | None = getattr(self.latency, level)
        if level in self.bandwidth:
            return Link(self.bandwidth[level], seconds or 0.0)
        link, fact = _known_link(self.kind, level)
        self.facts.append(fact)
        return link if seconds is None else replace(link, latency_seconds=seconds)


def read_cluster(options: ClusterOptions) -> "Cluster":
    """The cluster of the options.

    Raises
    ------
    InputError
        If an option is missing, is not valid or does not belong to the others.
    """
    named = [options.matrix is not None, options.nvidia_smi is not None, options.dgx1]
    shape = options.shape or ""
    is_count = _COUNT.fullmatch(shape) is not None
    if sum(named) > 1 or not (shape or any(named)) or (shape and any(named) and not is_count):
        raise InputError(
            "give one of: a shape such as 8x4 or a100:2x4,v100:3x8; --matrix, --nvidia-smi, --dgx1 "
            "(with a number of such servers, for example 4, if there are several)"
        )
    if options.gives("inter_rack") and _RACKS.fullmatch(shape) is None:
        raise InputError("--inter-rack and --latency-inter-rack belong to a shape such as 4x8x4")
    if options.pcie is not None and options.nvidia_smi is None:
        raise InputError("--pcie belongs to --nvidia-smi FILE, whose paths have its rates")
    if options.describes_server:
        return _of_server(options)
    return _of_kinds(options, shape) if ":" in shape else _of_shape(options, shape)


def _of_server(options: ClusterOptions) -> "Cluster":
    """One server that a file or a name describes, or several of it."""
    from stagewright.graphs.machines.servers import repeated

    if options.bandwidth.intra and options.nvidia_smi is None:
        raise InputError(
            "--intra belongs to a shape such as 8x4, or to --nvidia-smi FILE: the server's links "
            "are given"
        )
    # The bandwidths inside are those of paths, not of kinds.
    rest = options.model_copy(update={"intra": None})
    kind = _read_kinds([options.device or ("v100" if options.dgx1 else None)], rest)[0]
    made = _server(options, kind)
    if options.shape is not None:
        made = repeated(made, int(options.shape), kind.link("inter"))
    elif options.gives("inter"):
        raise InputError(
            "--inter and --latency-inter belong to a shape such as 8x4, or to a number of servers, "
            "for example 4 --nvidia-smi topo.txt"
        )
    return _with_source(made, [kind])


def _server(options: ClusterOptions, kind: _Kind) -> "Cluster":
    """One server with the kind's devices."""
    from stagewright.graphs.machines import topology

    every: dict[str, Any] = {"kind": kind.kind, "memory_bytes": kind.device.memory_bytes}
    if options.latency.intra is not None:
        every["latency"] = options.latency.intra
    if options.matrix is not None:
        made = topology.read_matrix(options.matrix, **every)
    elif options.nvidia_smi is not None:
        made = _of_topology(options.nvidia_smi, options, every)
    else:
        made = topology.dgx1(**every)
    return _with_host(made, kind.device.host_bytes_per_second)


def _of_topology(path: Path, options: ClusterOptions, every: dict[str, Any]) -> "Cluster":
    """The server that a file of ``nvidia-smi topo -m`` describes, with the rates of its paths."""
    from stagewright.graphs.machines import topology

    text, place = documents.read_text(path), str(path)
    paths = read_by_kind(
        options.bandwidth.intra,
        "--intra",
        parse_bandwidth,
        topology.nvidia_smi_paths(text, place),
        lambda path, _: path.strip().upper(),
    )
    return topology.parse_nvidia_smi(
        text, place=place, pcie=options.pcie or 3, paths=paths, **every
    )


def _of_kinds(options: ClusterOptions, shape: str) -> "Cluster":
    """Servers of several kinds."""
    from stagewright.graphs.machines.servers import mixed_servers

    if options.device is not None:
        raise InputError(f"--device {options.device}: the shape {shape} names the kinds")
    parts = read_groups(shape, "the shape")
    kinds = _read_kinds([kind for kind, _, _ in parts], options)
    total = sum(servers for _, servers, _ in parts)
    groups = [
        _group(kind, servers, devices, total)
        for kind, (_, servers, devices) in zip(kinds, parts, strict=True)
    ]
    shapes = [f"{one.device.kind}:{one.servers}x{one.devices}" for one in groups]
    return _with_source(mixed_servers(groups, ",".join(shapes)), kinds)


def _of_shape(options: ClusterOptions, shape: str) -> "Cluster":
    """Equal servers, in racks or not."""
    from stagewright.graphs.machines.cluster import Link
    from stagewright.graphs.machines.servers import mixed_servers
    from stagewright.graphs.machines.topology import uniform_racks

    if _SHAPE.fullmatch(shape) is None:
        raise InputError(
            f"{shape!r} is no shape; write servers x devices, for example 8x4, racks x servers "
            "x devices, 4x8x4, or servers by kind, a100:2x4,v100:3x8"
        )
    racks, servers, devices = [1, *map(int, shape.lower().split("x"))][-3:]
    kind = _read_kinds([options.device], options)[0]
    is_linked = options.bandwidth.inter_rack is not None
    group = _group(kind, servers, devices, servers, is_linked=is_linked)
    if options.bandwidth.inter_rack is None:
        if racks > 1:
            raise InputError("--inter-rack is missing: the racks must be connected, e.g. 100Gbps")
        return _with_source(mixed_servers([group], f"{servers}x{devices}"), [kind])
    between = Link(
        parse_bandwidth(options.bandwidth.inter_rack, "--inter-rack"),
        options.latency.inter_rack or 0.0,
    )
    inner = group.intra or group.inter or between
    device = kind.device
    made = uniform_racks(
        racks, servers, devices, (inner, group.inter or inner, between),
        kind=device.kind, memory_bytes=device.memory_bytes, peak_flops=device.peak_flops,
    )  # fmt: skip
    return _with_source(_with_host(made, device.host_bytes_per_second), [kind])


def _group(
    kind: _Kind, servers: int, devices: int, total: int, *, is_linked: bool = False
) -> "ServerGroup":
    """The servers of a kind among ``total`` servers, with the links that they need.

    A single device has a link too, unless it ``is_linked`` to other racks.
    """
    from stagewright.graphs.machines.servers import ServerGroup

    intra = kind.link("intra") if devices > 1 or "intra" in kind.bandwidth else None
    inter = kind.link("inter") if total > 1 or "inter" in kind.bandwidth else None
    if intra is None and inter is None and not is_linked:
        intra = kind.link("intra")
    return ServerGroup(kind.device, servers, devices, intra, inter)


def _read_kinds(texts: Sequence[str | None], options: ClusterOptions) -> list[_Kind]:
    """The kinds that ``texts`` name (None: the generic one), with their values."""
    from stagewright.graphs.machines.devices import GENERIC, read_kind

    found = [read_kind(text or GENERIC) for text in texts]
    names = [(one if isinstance(one, str) else one.name).lower() for one in found]
    values = _values(options, names)
    phrases = [
        f"{_phrase(one)}, as --device is not given" if text is None else _phrase(one)
        for text, one in zip(texts, found, strict=True)
    ]
    return [
        _kind(
            kind, phrase, {option: of[name] for option, of in values.items() if name in of}, options
        )
        for kind, phrase, name in zip(found, phrases, names, strict=True)
    ]


def _values(options: ClusterOptions, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """The values of every option by the kind's name in lower case."""

    def known(kind: str, option: str) -> str:
        if kind.strip().lower() in names:
            return kind.strip().lower()
        raise InputError(f"{option}: {kind.strip()!r} is none of {', '.join(dict.fromkeys(names))}")

    texts = {
        "memory": options.memory,
        "host-bandwidth": options.host_bandwidth,
        "intra": options.bandwidth.intra,
        "inter": options.bandwidth.inter,
    }
    return {
        option: read_by_kind(
            text,
            f"--{option}",
            parse_bytes if option == "memory" else parse_bandwidth,
            names,
            known,
        )
        for option, text in texts.items()
    }


def _kind(
    kind: "str | Accelerator", phrase: str, given: dict[str, float], options: ClusterOptions
) -> _Kind:
    from stagewright.graphs.machines.cluster import Device
    from stagewright.graphs.machines.devices import kind_of_device

    name, memory, peak = kind_of_device(kind, given.get("memory"))
    known = None if isinstance(kind, str) else kind.host_bytes_per_second
    host = given.get("host-bandwidth", known)
    facts = [] if "memory" in given else [f"memory {format_bytes(memory)}"]
    device = Device(name, name, memory, peak, host)
    return _Kind(kind, phrase, device, given, options.latency, facts)


def _known_link(kind: "str | Accelerator", level: Level) -> tuple["Link", str]:
    """The link of a kind of device, and a phrase that states its bandwidth."""
    from stagewright.graphs.machines.devices import ACCELERATORS
    from stagewright.graphs.machines.networks import (
        NETWORK_SHARE,
        SERVER_SHARE,
        network_link,
        server_link,
    )

    where, example = _WHERE[level]
    share = SERVER_SHARE if level == "intra" else NETWORK_SHARE
    card = ACCELERATORS.get(kind.lower()) if isinstance(kind, str) else kind
    link_of = server_link if level == "intra" else network_link
    link = None if card is None else link_of(card)
    if link is None:
        name = kind if isinstance(kind, str) else kind.name
        raise InputError(
            f"--{level} is missing: links of kind {name} are not known; give those {where}, for "
            f"example --{level} {example}"
        )
    rate = link.bandwidth_bytes_per_second / 1e9
    return link, f"{rate:.4g} GB/s {where} ({share:.1%} of {rate / share:.4g})"


def _with_source(cluster: "Cluster", kinds: Iterable[_Kind]) -> "Cluster":
    """The cluster, whose source says what was assumed of each kind."""
    said = [] if cluster.source is None else [cluster.source]
    for kind in kinds:
        facts = ", ".join(dict.fromkeys(kind.facts))
        if facts:
            said.append(f"devices {kind.phrase}; assumed: {facts}")
        elif kind.phrase != kind.device.kind:
            said.append(f"devices {kind.phrase}")
    return replace(cluster, source="; ".join(dict.fromkeys(said)) or None)


def _phrase(kind: "str | Accelerator") -> str:
    from stagewright.graphs.machines.devices import ACCELERATORS

    return str(ACCELERATORS.get(kind.lower(), kind)) if isinstance(kind, str) else str(kind)


def _with_host(cluster: "Cluster", rate: float | None) -> "Cluster":
    """The cluster with that bandwidth to host memory, if it is known."""
    if rate is None:
        return cluster
    devices = tuple(replace(one, host_bytes_per_second=rate) for one in cluster.devices)
    return replace(cluster, devices=devices)
