"""The options of ``cluster``, and the kinds of devices with the values that they give."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field

from stagewright.cli.options import Written, read_by_kind
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
    from stagewright.graphs.machines.topology import Listed

T = TypeVar("T")

_CARDS = re.compile(r"(\d+)\s*[xX]\s*(\d.*)")

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
    a100:2x4,v100:3x8; or a number of servers, each that of --from, --dgx1 or --matrix, of several
    files by kind, a100:2,h100:4."""
    intra: str | None = None
    """Bandwidth inside a server, for example 100GB/s; default: that of the kind. Bandwidths and
    memory may be given by kind: a100=300GB/s,v100=25GB/s; this one, with --from, by path:
    PIX=24GB/s,SYS=16GB/s."""
    inter: str | None = None
    """Bandwidth between servers, for example 12.5GB/s or 100Gbps; 4x100Gbps: of a server's cards,
    which its devices share."""
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
    oversubscription: Annotated[float | None, Option(form="FACTOR"), Field(ge=1)] = None
    """In place of --inter-rack: how much more the devices of a rack can send than its uplinks."""
    latency_inter_rack: Annotated[float | None, Option(form="TIME", of_text=parse_latency)] = None
    """Latency between racks, for example 50us."""
    matrix: Path | None = None
    """A text file of bandwidths, a row per device."""
    listings: Annotated[list[Path] | None, Option("--from", "--nvidia-smi", form="FILE")] = None
    """What nvidia-smi topo -m, rocm-smi --showtopo, lstopo, ibstat, Slurm or kubectl print; several
    times: of servers of several kinds."""
    pcie: Annotated[int | None, Field(ge=3), Field(le=5)] = None
    """With --from: generation of PCIe, 3, 4 or 5; default: that of the file, else 3."""
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
        return self.matrix is not None or self.dgx1

    def gives(self, level: str) -> bool:
        """Whether there is an option of the links of a level."""
        return any(getattr(one, level) is not None for one in (self.bandwidth, self.latency))


@dataclass(frozen=True, slots=True)
class _Network:
    """What a device sends out of its server, or the cards of the server, which its devices share.

    ``text`` says of how many cards ``cards_bytes_per_second`` is the sum.
    """

    bytes_per_second: float = 0.0
    cards_bytes_per_second: float = 0.0
    text: str = ""

    def link(self, devices: int) -> tuple["Link", str]:
        """The link of each of a server's ``devices``, and a phrase that states its bandwidth."""
        from stagewright.graphs.machines.cluster import Link
        from stagewright.graphs.machines.networks import NETWORK_LATENCY, NETWORK_SHARE

        if not self.cards_bytes_per_second:
            return Link(self.bytes_per_second), ""
        rate = NETWORK_SHARE * self.cards_bytes_per_second / devices
        fact = f"{rate / 1e9:.4g} GB/s between servers ({NETWORK_SHARE:.1%} of {self.text}"
        return Link(rate, NETWORK_LATENCY), f"{fact}, over {devices} devices)"


def _network(text: str, option: str) -> _Network:
    """``12.5GB/s`` of each device, or the cards of a server: ``4x100Gbps``."""
    cards = _CARDS.fullmatch(text.strip())
    if cards is None:
        return _Network(parse_bandwidth(text, option))
    return _Network(0.0, int(cards[1]) * parse_bandwidth(cards[2], option), text.strip())


def cards_of(listed: "Listed") -> _Network | None:
    """The network of the cards that ``ibstat`` lists: as many of the fastest as serve all alike."""
    rates, devices = listed.card_bytes_per_second, len(listed.devices)
    if not rates:
        return None
    number = rates.count(max(rates))
    used = number if number < devices else number // devices * devices
    text = f"{used} of {len(rates)} cards of {max(rates) * 8e-9:g} Gb/s"
    return _Network(0.0, used * max(rates), text)


@dataclass(frozen=True, slots=True)
class DescribedKind:
    """A kind of device with the values that the options give for it.

    ``phrase`` names the kind, ``device`` is one of it, ``facts`` are what was assumed of it.
    """

    kind: "str | Accelerator"
    phrase: str
    device: "Device"
    intra: float | None
    network: _Network | None
    latency: _ByLevel[float | None]
    facts: list[str]

    def devices(self, count: int) -> tuple["Device", ...]:
        """The devices of a server."""
        return tuple(replace(self.device, name=f"g{i}") for i in range(count))

    def link(self, level: Level, devices: int = 1, cards: _Network | None = None) -> "Link":
        """The link that is given, that of a server's cards, or that of the kind."""
        from stagewright.graphs.machines.cluster import Link

        seconds: float | None = getattr(self.latency, level)
        network = self.network or cards if level == "inter" else None
        if level == "intra" and self.intra is not None:
            return Link(self.intra, seconds or 0.0)
        link, fact = network.link(devices) if network else _known_link(self.kind, level)
        if fact:
            self.facts.append(fact)
        return link if seconds is None else replace(link, latency_seconds=seconds)


def read_kinds(texts: Sequence[str | None], options: ClusterOptions) -> list[DescribedKind]:
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
        _described(kind, phrase, values, options)
        for kind, phrase in zip(found, phrases, strict=True)
    ]


def _described(
    kind: "str | Accelerator",
    phrase: str,
    values: dict[str, dict[str, Any]],
    options: ClusterOptions,
) -> DescribedKind:
    """The kind with its values of the options; ``values`` has them by the name in lower case."""
    from stagewright.graphs.machines.cluster import Device
    from stagewright.graphs.machines.devices import kind_of_device

    key = (kind if isinstance(kind, str) else kind.name).lower()
    given = {option: of[key] for option, of in values.items() if key in of}
    name, memory, peak = kind_of_device(kind, given.get("memory"))
    known = None if isinstance(kind, str) else kind.host_bytes_per_second
    host = given.get("host-bandwidth", known)
    facts = [] if "memory" in given else [f"memory {format_bytes(memory)}"]
    device = Device(name, name, memory, peak, host)
    return DescribedKind(
        kind, phrase, device, given.get("intra"), given.get("inter"), options.latency, facts
    )


def _values(options: ClusterOptions, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The values of every option by the kind's name in lower case."""

    def known(kind: str, option: str) -> str:
        if kind.strip().lower() in names:
            return kind.strip().lower()
        raise InputError(f"{option}: {kind.strip()!r} is none of {', '.join(dict.fromkeys(names))}")

    texts: dict[str, tuple[str | None, Callable[[str, str], Any]]] = {
        "memory": (options.memory, parse_bytes),
        "host-bandwidth": (options.host_bandwidth, parse_bandwidth),
        "intra": (options.bandwidth.intra, parse_bandwidth),
        "inter": (options.bandwidth.inter, _network),
    }
    return {
        option: read_by_kind(text, f"--{option}", parse, names, known)
        for option, (text, parse) in texts.items()
    }


def _known_link(kind: "str | Accelerator", level: Level) -> tuple["Link", str]:
    """The link of a kind of device, and a phrase that states its bandwidth."""
    from stagewright.graphs.machines.devices import known_kind
    from stagewright.graphs.machines.networks import (
        NETWORK_SHARE,
        SERVER_SHARE,
        network_link,
        server_link,
    )

    where, example = _WHERE[level]
    share = SERVER_SHARE if level == "intra" else NETWORK_SHARE
    card = known_kind(kind)
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


def with_source(cluster: "Cluster", kinds: Iterable[DescribedKind]) -> "Cluster":
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
    from stagewright.graphs.machines.devices import known_kind

    return str(known_kind(kind) or kind)


def with_host(cluster: "Cluster", rate: float | None) -> "Cluster":
    """The cluster with that bandwidth to host memory, if it is known."""
    if rate is None:
        return cluster
    devices = tuple(replace(one, host_bytes_per_second=rate) for one in cluster.devices)
    return replace(cluster, devices=devices)
