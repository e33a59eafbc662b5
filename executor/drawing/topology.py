"""The cluster of a plan as a drawing: servers, their links, and the stages on devices."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stagewright.formulations.plans.plan import PipelinePlan, Predicted, Stage
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import byte_unit, format_bytes, format_seconds
from stagewright.graphs.machines.cluster import Cluster, Link, ServerLinks

_MOST_ROUND = 16  # devices of a server that are drawn in a ring, with a line for each link
HEAD = ("<server", "<device", "<kind", "<stage and replica", "memory", "sent and received",
        "all-reduced")  # fmt: skip


def topology(plan: PipelinePlan, cluster: Cluster) -> dict[str, Any]:
    """The data of the page's script: servers, levels of links, and devices with their stages.

    Bandwidths are bytes per second of each direction. Raises InputError if a device of the plan is
    not in the cluster.
    """
    for name in (name for stage in plan.stages for name in stage.devices):
        if name not in cluster.index:
            raise InputError(f"cluster {cluster.name}: the plan's device {name!r} is not in it")
    racks = _racks(cluster)
    return {
        "stages": len(plan.stages),
        "levels": list(_levels(cluster)),
        "servers": [
            {"devices": server, "rack": racks[server[0]], "links": _links_in(cluster, server)}
            for server in cluster.servers
        ],
        "devices": list(_devices(plan, cluster)),
    }


def topology_rows(drawing: dict[str, Any]) -> list[list[str]]:
    """The drawing as a table; a server's devices that differ by name and replica are one row."""
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for number, server in enumerate(drawing["servers"]):
        for one in (drawing["devices"][i] for i in server["devices"]):
            key = (number, *one["stages"], one["kind"], one["memory"], one["sent"], one["reduced"])
            rows.setdefault(key, []).append(one)
    return [
        [
            str(number),
            ", ".join(one["name"] for one in same),
            same[0]["kind"],
            _places([one["about"] for one in same]),
            same[0]["memory"],
            same[0]["sent"],
            same[0]["reduced"],
        ]
        for (number, *_), same in rows.items()
    ]


def _places(abouts: Sequence[Sequence[str]]) -> str:
    """Text on several devices with the same stages: first device to last device."""
    if not abouts[0]:
        return "not used"
    ends = zip(abouts[0], abouts[-1], strict=True)
    return "; ".join(
        first if first == last else f"{first} to {last.split(', ', 1)[1]}" for first, last in ends
    )


def _racks(cluster: Cluster) -> list[int]:
    """The number of each device's rack; all 0 where there are none."""
    found = [0] * len(cluster)
    links = cluster.links
    for number, rack in enumerate((links.racks or ()) if isinstance(links, ServerLinks) else ()):
        for name in rack:
            found[cluster.index[name]] = number
    return found


def _levels(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Links inside a server, between servers, and between racks, as far as there are any."""
    links = cluster.links
    if isinstance(links, ServerLinks):
        several = len(cluster.servers) > 1
        named = (("within a server", links.intra), ("between servers", links.inter),
                 ("between racks", links.inter_rack))  # fmt: skip
        for place, (name, link) in enumerate(named):
            if link is not None and (several or place == 0):
                yield {"name": name, "text": _of_link(link), "bandwidth": _rate(link)}
        return
    homes = np.zeros(len(cluster), dtype=np.int64)
    for number, server in enumerate(cluster.servers):
        homes[list(server)] = number
    same = homes[:, None] == homes
    for name, pairs in (("within a server", same), ("between servers", ~same)):
        rates = cluster.direct_bandwidth[pairs & (cluster.direct_bandwidth > 0)]
        if rates.size:
            yield {"name": name, "text": _range(rates), "bandwidth": float(rates.max())}


def _rate(link: Link) -> float:
    return link.bandwidth_bytes_per_second


def _of_link(link: Link) -> str:
    text = _per_second(link.bandwidth_bytes_per_second)
    if link.latency_seconds:
        text += f", {format_seconds(link.latency_seconds)} latency"
    return text


def _range(rates: Floats) -> str:
    low, high = float(rates.min()), float(rates.max())
    if low == high:
        return _per_second(low)
    unit, scale = byte_unit(high)
    return f"{low / scale:.3g} to {high / scale:.3g} {unit}/s"


def _per_second(rate: float) -> str:
    return f"{format_bytes(rate)}/s"


def _links_in(cluster: Cluster, server: Sequence[int]) -> list[tuple[int, int, float]]:
    """The links of a server's pairs of devices, where they are not all the same."""
    if isinstance(cluster.links, ServerLinks) or not 2 < len(server) <= _MOST_ROUND:
        return []
    block = cluster.direct_bandwidth[np.ix_(server, server)]
    block = np.maximum(block, block.T)
    pairs = [(i, j) for i in range(len(server)) for j in range(i)]
    if len({block[i, j] for i, j in pairs}) == 1:
        return []
    return [(server[i], server[j], float(block[i, j])) for i, j in pairs if block[i, j] > 0]


def _devices(plan: PipelinePlan, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Every device: its stages, replicas, memory, and bytes of an iteration."""
    homes: list[list[tuple[int, int]]] = [[] for _ in cluster.devices]
    for s, stage in enumerate(plan.stages):
        for place, name in enumerate(stage.devices):
            homes[cluster.index[name]].append((s, place))
    predicted = plan.predicted or Predicted(0.0, 0.0, {}, {})
    for device, its in zip(cluster.devices, homes, strict=True):
        peak, capacity = (
            of.get(device.name) for of in (predicted.peak_memory_bytes, predicted.capacity_bytes)
        )
        stages = [s for s, _ in its]
        limit = device.memory_bytes if capacity is None else capacity
        sent = sum(_sent(plan, predicted, s, place) for s, place in its)
        reduced = sum(predicted.link_bytes.get(str(s), 0.0) for s in stages)
        yield {
            "name": device.name,
            "kind": device.kind,
            "stages": stages,
            "about": [_about(plan.stages[s], s, place) for s, place in its],
            "share": None if peak is None else round(peak / limit, 4),
            "memory": _memory(peak, limit),
            "sent": format_bytes(sent) if plan.predicted and its else "",
            "reduced": format_bytes(reduced) if reduced else "",
        }


def _about(stage: Stage, number: int, place: int) -> str:
    """A device's stages, and its replica and shard of each stage."""
    text = f"stage {number}"
    if stage.replicas > 1:
        text += f", replica {place // stage.tensor + 1} of {stage.replicas}"
    if stage.tensor > 1:
        text += f", shard {place % stage.tensor + 1} of {stage.tensor}"
    return text


def _memory(peak: float | None, limit: float) -> str:
    used = "" if peak is None else f"{format_bytes(peak)} of "
    return used + format_bytes(limit)


def _sent(plan: PipelinePlan, predicted: Predicted, number: int, place: int) -> float:
    """Bytes that a device of a stage sends to its neighbours and receives, in an iteration."""
    return _share(plan, number, place) * sum(
        predicted.link_bytes.get(f"{s}-{s + 1}", 0.0) for s in (number - 1, number)
    )


def _share(plan: PipelinePlan, number: int, place: int) -> float:
    """The share of a stage's bytes that a device has: of the microbatches that are its turn."""
    stage, group = plan.stages[number], len(plan.stages[number].runners(0))
    turn = place // group
    own = len(range(turn, plan.microbatches, stage.turns))
    return own / plan.microbatches / group
