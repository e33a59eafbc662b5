"""Clusters of unequal servers: pools of equal ones, zones, and what their links reach."""

from dataclasses import dataclass

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    MAX_DEVICES,
    require_amount,
    require_bandwidth,
    require_count,
)


@dataclass(frozen=True, slots=True)
class Route:
    """What a link reaches: bytes/s of each device in a ring, and of a whole group at most.

    A tensor group sends a tensor to another with all its devices: at ``device_bytes_per_second``
    times their number, at most ``group_bytes_per_second``. In an all-reduce every rank of the
    tensor groups has a ring of its own, at ``device_bytes_per_second``.
    """

    device_bytes_per_second: float
    group_bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        require_bandwidth(self.device_bytes_per_second, "device_bytes_per_second")
        require_bandwidth(self.group_bytes_per_second, "group_bytes_per_second")
        require_amount(self.latency_seconds, "latency_seconds")

    def through(self, other: "Route") -> "Route":
        """Both one after the other: the slower of each."""
        return Route(
            min(self.device_bytes_per_second, other.device_bytes_per_second),
            min(self.group_bytes_per_second, other.group_bytes_per_second),
            max(self.latency_seconds, other.latency_seconds),
        )

    def send_seconds(self, moved: float, tensor: int) -> float:
        """Time to send ``moved`` bytes from one tensor group to another; the smaller's ``tensor``.

        Both groups are busy with it.
        """
        rate = min(tensor * self.device_bytes_per_second, self.group_bytes_per_second)
        return self.latency_seconds + moved / rate

    def reduce_seconds(self, moved: float, size: int) -> float:
        """Time to sum ``moved`` bytes per rank over a ring of ``size`` ranks."""
        if size == 1:
            return 0.0
        steps = 2 * (size - 1)
        return steps * (self.latency_seconds + moved / size / self.device_bytes_per_second)


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal servers in one zone. ``inside`` is between devices of a server (None: as outside)."""

    device_kind: str
    zone: str
    servers: int
    devices: int
    memory_bytes: float
    network: Route
    inside: Route | None = None

    def __post_init__(self) -> None:
        place = f"pool of {self.device_kind!r} in {self.zone!r}"
        require_count(self.servers, f"{place}: servers", MAX_DEVICES)
        require_count(self.devices, f"{place}: devices", MAX_DEVICES)
        require_amount(self.memory_bytes, f"{place}: memory_bytes")


@dataclass(frozen=True, slots=True)
class ServerPools:
    """The cluster; ``between_zones`` is needed with several zones."""

    pools: tuple[Pool, ...]
    between_zones: Route | None = None

    def __post_init__(self) -> None:
        if not self.pools:
            raise InputError("a cluster needs at least one pool of servers")
        zones = sorted({pool.zone for pool in self.pools})
        if len(zones) > 1 and self.between_zones is None:
            raise InputError(f"zones {', '.join(zones)}: between_zones is missing")

    def route(self, one: int, other: int, *, same_server: bool) -> Route:
        """Between two groups in pools ``one`` and ``other`` (indices)."""
        first, second = self.pools[one], self.pools[other]
        if same_server and first.inside is not None:
            return first.inside
        found = first.network.through(second.network)
        if first.zone != second.zone and self.between_zones is not None:
            return found.through(self.between_zones)
        return found
