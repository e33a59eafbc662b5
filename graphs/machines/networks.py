"""Fabrics by the kind of their devices, for users who name a kind and a number of GPUs."""

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_count
from stagewright.graphs.machines.devices import accelerator
from stagewright.graphs.machines.fabric import MAX_GPUS, Fabric, Level

SERVER_SHARE, NETWORK_SHARE = 0.812, 0.84
"""The parts of a link's rate that collectives reach in and between servers where no bandwidth is
given: of NVLink and InfiniBand of DGX A100, fitted together with the rates of the A100 (see
``rates.py``); the same parts for other kinds are not measured."""

_SERVER = {
    "v100": 150e9,
    "v100-32gb": 150e9,
    "a100": 300e9,
    "a100-80gb": 300e9,
    "h100": 450e9,
    "h800": 200e9,
    "h200": 450e9,
    "b200": 900e9,
    "mi300x": 448e9,
}
"""Bytes/s per direction from a device to the others of its server: NVLink of the second to fifth
generation, seven Infinity Fabric links (the manufacturers' datasheets); of H800 and its eight
network cards DeepSeek-AI (arXiv 2505.09343, section 4.3), who reach 160 GB/s of the 200."""

_NETWORK = {
    "v100": 6.25e9,
    "v100-32gb": 12.5e9,
    "a100": 25e9,
    "a100-80gb": 25e9,
    "h100": 50e9,
    "h800": 50e9,
    "h200": 50e9,
    "b200": 50e9,
    "mi300x": 50e9,
}
"""Bytes/s per device out of a server: network cards of DGX-1, DGX-2, DGX A100, DGX H100, DGX B200,
and 400 Gb/s for every MI300X."""

SERVER_LATENCY, NETWORK_LATENCY = 2.7e-6, 4.7e-6
"""Seconds of a step of a collective: the first from the same fit, the network's 2 us above it."""


def fabric_of_kind(
    kind: str,
    devices: int,
    *,
    per_server: int = 8,
    server_bandwidth: float | None = None,
    network_bandwidth: float | None = None,
    per_rack: int | None = None,
    rack_bandwidth: float | None = None,
    memory_bytes: float | None = None,
    host_bytes_per_second: float | None = None,
) -> Fabric:
    """Servers of ``per_server`` devices; bandwidths are bytes/s per device and direction.

    ``rack_bandwidth`` is that out of a rack (or pod) of ``per_rack`` devices. Default bandwidths
    are parts of the kind's links (:data:`SERVER_SHARE`, :data:`NETWORK_SHARE`), default memory is
    the kind's.

    Raises
    ------
    InputError
        If the kind is unknown, its links are not known and not given, or the sizes do not divide.
    """
    card = accelerator(kind)
    require_count(devices, "gpus", MAX_GPUS)
    inside = min(per_server, devices)
    if devices % inside:
        raise InputError(f"gpus must be a multiple of per_server ({inside}), got {devices}")
    if (per_rack is None) != (rack_bandwidth is None):
        raise InputError("per_rack and rack_bandwidth belong together: give both")
    within = _given(server_bandwidth, SERVER_SHARE, _SERVER, card.name, "server_bandwidth")
    levels = [Level("server", inside, within, SERVER_LATENCY)]
    if devices > inside:
        between = _given(network_bandwidth, NETWORK_SHARE, _NETWORK, card.name, "network_bandwidth")
        size = devices if per_rack is None else min(per_rack, devices)
        levels.append(
            Level("rack" if size < devices else "network", size, between, NETWORK_LATENCY)
        )
        if size < devices and rack_bandwidth is not None:
            levels.append(Level("network", devices, rack_bandwidth, NETWORK_LATENCY))
    memory = card.memory_bytes if memory_bytes is None else memory_bytes
    return Fabric(card.name, memory, tuple(levels), host_bytes_per_second)


def _given(
    value: float | None, share: float, known: dict[str, float], kind: str, what: str
) -> float:
    if value is not None:
        return value
    if kind not in known:
        raise InputError(f"{what} of {kind} is not known: give it, for example 50GB/s")
    return share * known[kind]
