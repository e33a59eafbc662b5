"""From options to the servers that a profiled model is planned on."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.cli.server_inputs import read_by_kind, read_groups
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.formulations.parallelism.profiled_cluster import Pool, ServerPools


def read_server_pools(
    servers: str | None,
    cluster: Path | None,
    rates: dict[str, str | None],
    kinds: Sequence[str],
) -> "ServerPools":
    """The servers of the options, or of a cluster file.

    ``rates`` are the texts of ``memory``, ``server_bandwidth`` and ``network_bandwidth``: a value
    for all kinds, or values by kind; ``kinds`` those that were profiled.
    """
    from stagewright.formulations.parallelism.profiled_cluster import ServerPools, server_pools
    from stagewright.graphs.machines.cluster import load_cluster

    if (servers is None) == (cluster is None):
        raise InputError(
            "layer profiles need one of --servers, for example a100:2x4,v100:3x8 (2 servers of 4, "
            "3 of 8), and --cluster FILE"
        )
    if cluster is not None:
        stray = [f"--{name.replace('_', '-')}" for name, text in rates.items() if text is not None]
        if stray:
            raise InputError(f"{', '.join(stray)}: the cluster file says it; leave it out")
        return server_pools(load_cluster(cluster))
    found = _shapes(servers or "", kinds)
    by_kind = {name: _by_kind(name, text, kinds) for name, text in rates.items()}
    is_alone = [count for _, count, _ in found] == [1]
    return ServerPools(tuple(_pool(*one, by_kind, is_alone) for one in found))


def _shapes(text: str, kinds: Sequence[str]) -> list[tuple[str, int, int]]:
    """Kind, servers and devices of a server of every pool."""
    return [
        (_measured(kind, kinds, "--servers"), servers, devices)
        for kind, servers, devices in read_groups(text, "--servers")
    ]


def _measured(kind: str, kinds: Sequence[str], option: str) -> str:
    """The kind as the profiles spell it."""
    for one in kinds:
        if one.lower() == kind.strip().lower():
            return one
    raise InputError(f"{option}: {kind.strip()!r} was not profiled, only {', '.join(kinds)}")


def _by_kind(name: str, text: str | None, kinds: Sequence[str]) -> dict[str, float]:
    """The value of each kind; none is given where the text is None."""
    from stagewright.graphs.documents.units import parse_bandwidth, parse_bytes

    option = f"--{name.replace('_', '-')}"
    parse: Callable[[str, str], float] = parse_bytes if name == "memory" else parse_bandwidth
    return read_by_kind(
        text, option, parse, kinds, lambda kind, option: _measured(kind, kinds, option)
    )


def _pool(
    kind: str,
    servers: int,
    devices: int,
    by_kind: dict[str, dict[str, float]],
    is_alone: bool,
) -> "Pool":
    from stagewright.formulations.parallelism.profiled_cluster import pool_of_kind

    inside = by_kind["server_bandwidth"].get(kind)
    between = by_kind["network_bandwidth"].get(kind)
    given = {
        "memory": by_kind["memory"].get(kind),
        "server-bandwidth": between if inside is None and devices == 1 else inside,
        "network-bandwidth": inside if between is None and is_alone else between,
    }
    _require_known(kind, given)
    return pool_of_kind(
        kind,
        servers,
        devices,
        memory_bytes=given["memory"],
        server_bandwidth=given["server-bandwidth"],
        network_bandwidth=given["network-bandwidth"],
    )


def _require_known(kind: str, given: dict[str, float | None]) -> None:
    """Name all that is missing of a kind that is not in the table of accelerators."""
    from stagewright.graphs.machines.devices import ACCELERATORS

    missing = [f"--{name}" for name, value in given.items() if value is None]
    if missing and kind.lower() not in ACCELERATORS:
        example = f"{missing[0]} {kind}={'40GB' if missing[0] == '--memory' else '10GB/s'}"
        raise InputError(
            f"{kind} is none of the kinds that are known ({', '.join(ACCELERATORS)}): give "
            f"{', '.join(missing)}, for example {example}"
        )
