"""Fabrics by the kind of their devices, for users who name a kind and a number of GPUs."""

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_count
from stagewright.graphs.machines.cluster import Link
from stagewright.graphs.machines.devices import (
    ACCELERATORS,
    NVLINK,
    Accelerator,
    accelerator,
    known_kind,
)
from stagewright.graphs.machines.fabric import MAX_GPUS, Fabric, Level

SERVER_SHARE, NETWORK_SHARE = 0.812, 0.84
"""The parts of a link's rate that collectives reach in and between servers where no bandwidth is
given: of NVLink and InfiniBand of DGX A100, fitted together with the rates of the A100 (see
``rates.py``); the same parts for other kinds are not measured.

Of an NVLink's 25 GB/s NCCL 2.30 counts 20 on A100 and 20.6 on H100 (src/graph/topo.h), 0.80 and
0.82: the 450 GB/s of an H100's 18 links are what the wires carry, 365 is what a plan can count on.
"""

SERVER_LATENCY, NETWORK_LATENCY = 2.4e-6, 4.4e-6
"""Seconds of a hop of a ring: the first from the same fit, the network's 2 us above it."""


def fabric_of_kind(
    kind: str | Accelerator,
    devices: int,
    *,
    per_server: int | None = None,
    server_bandwidth: float | None = None,
    network_bandwidth: float | None = None,
    per_rack: int | None = None,
    rack_bandwidth: float | None = None,
    memory_bytes: float | None = None,
    host_bytes_per_second: float | None = None,
) -> Fabric:
    """Servers of ``per_server`` devices; bandwidths are bytes/s per device and direction.

    ``per_server`` is 8 by default; where NVLink joins more, as many of them as divide all devices.

    ``rack_bandwidth`` is that out of a rack (or pod) of ``per_rack`` devices. Default bandwidths
    are parts of the kind's links (:data:`SERVER_SHARE`, :data:`NETWORK_SHARE`), default memory is
    the kind's. ``kind`` is a name or the user's own. Raises InputError if the kind is unknown, its
    links are not known and not given, or the sizes do not divide.
    """
    card = accelerator(kind)
    require_count(devices, "gpus", MAX_GPUS)
    inside = min(per_server or _domain(card, devices), devices)
    if devices % inside:
        fewer = devices // inside * inside
        size = _part(devices, inside)
        raise InputError(
            f"gpus {devices} are not whole servers of {inside}: give {fewer} or {fewer + inside}, "
            f"or the GPUs in a server with per_server, such as {size}"
        )
    if (per_rack is None) != (rack_bandwidth is None):
        raise InputError("per_rack and rack_bandwidth belong together: give both")
    within = _given(
        server_bandwidth, SERVER_SHARE, card.server_bytes_per_second, card, "server_bandwidth"
    )
    levels = [Level("server", inside, within, SERVER_LATENCY)]
    if devices > inside:
        between = _given(
            network_bandwidth, NETWORK_SHARE, card.network_bytes_per_second, card,
            "network_bandwidth",
        )  # fmt: skip
        size = devices if per_rack is None else min(per_rack, devices)
        levels.append(
            Level("rack" if size < devices else "network", size, between, NETWORK_LATENCY)
        )
        if size < devices and rack_bandwidth is not None:
            levels.append(Level("network", devices, rack_bandwidth, NETWORK_LATENCY))
    memory = card.memory_bytes if memory_bytes is None else memory_bytes
    host = host_bytes_per_second or card.host_bytes_per_second
    own = None if card.name in ACCELERATORS else card
    return Fabric(card.name, memory, tuple(levels), host, own)


def _domain(card: Accelerator, devices: int) -> int:
    """Devices in a server, or in as large a part of an NVLink domain as divides them all."""
    return card.nvlink_domain if card.nvlink_domain <= 8 else _part(devices, card.nvlink_domain)


def _part(devices: int, most: int) -> int:
    """The largest divisor of ``devices`` that is at most ``most``."""
    return max(one for one in range(1, most + 1) if devices % one == 0)


def nvlink_rate(kind: str | Accelerator) -> float:
    """Bytes/s per direction of one NVLink of a kind; for an unknown kind the rate of a V100."""
    card = known_kind(kind)
    return SERVER_SHARE * (NVLINK if card is None else card.nvlink_bytes_per_second)


def server_link(card: Accelerator) -> Link | None:
    """The link between two devices of a server; None if the kind's links are not known."""
    rate = card.pair_bytes_per_second or card.server_bytes_per_second
    return None if rate is None else Link(SERVER_SHARE * rate, SERVER_LATENCY)


def network_link(card: Accelerator) -> Link | None:
    """The link between devices of two servers; None if the kind's network is not known."""
    rate = card.network_bytes_per_second
    return None if rate is None else Link(NETWORK_SHARE * rate, NETWORK_LATENCY)


def _given(
    value: float | None, share: float, known: float | None, card: Accelerator, what: str
) -> float:
    if value is not None:
        return value
    if known is None:
        raise InputError(f"{what} of {card.name} is not known: give it, for example 50GB/s")
    return share * known
