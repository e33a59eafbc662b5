"""Fabrics of common servers: what their links reach in collectives, and latencies.

Of a DGX A100 (third-generation NVLink, 300 GB/s per direction and GPU; a 200 Gb/s InfiniBand card
per GPU) the figures are fitted together with the rates of the A100 (``rates.REACHED``) to
iteration times on NVIDIA's Selene. Those of a DGX H100 are the same fractions of its links (450
GB/s; 400 Gb/s), with the same latencies: they are not measured. A full fat tree joins the servers,
so that one level holds them all.
"""

from dataclasses import dataclass

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.devices import accelerator
from stagewright.graphs.machines.fabric import Fabric, Level


@dataclass(frozen=True, slots=True)
class Server:
    """Bytes/s of a device and direction, and seconds of a message, inside and between servers."""

    device: str
    devices: int
    inside_bytes_per_second: float
    inside_latency_seconds: float
    outside_bytes_per_second: float
    outside_latency_seconds: float


NVLINK_FRACTION = 0.812
INFINIBAND_FRACTION = 0.84
INSIDE_LATENCY, OUTSIDE_LATENCY = 2.7e-6, 4.7e-6


def _server(device: str, inside: float, outside: float) -> Server:
    return Server(
        device,
        8,
        NVLINK_FRACTION * inside,
        INSIDE_LATENCY,
        INFINIBAND_FRACTION * outside,
        OUTSIDE_LATENCY,
    )


SERVERS = {
    "dgx-a100": _server("a100-80gb", 300e9, 25e9),
    "dgx-h100": _server("h100", 450e9, 50e9),
}


def fabric_of_servers(name: str, devices: int) -> Fabric:
    """``devices`` in as many servers called ``name`` as they fill, or in a part of one.

    Raises
    ------
    InputError
        If the name is not known or the devices do not fill servers.
    """
    if name not in SERVERS:
        known = ", ".join(sorted(SERVERS))
        raise InputError(f"server {name!r} is not known; known are {known}")
    one = SERVERS[name]
    inside = Level(
        "server",
        min(devices, one.devices),
        one.inside_bytes_per_second,
        one.inside_latency_seconds,
    )
    levels: tuple[Level, ...] = (inside,)
    if devices > one.devices:
        if devices % one.devices:
            below = devices // one.devices * one.devices
            raise InputError(
                f"{devices} devices do not fill {name} servers of {one.devices}; the nearest are "
                f"{below} and {below + one.devices}"
            )
        outside = Level(
            "cluster", devices, one.outside_bytes_per_second, one.outside_latency_seconds
        )
        levels = (inside, outside)
    return Fabric(one.device, accelerator(one.device).memory_bytes, levels)
