"""Groups of a tensor degree t as devices, and bounds on plans of that degree.

A plan whose stages all have degree t becomes, on the devices of :func:`best_groups`, a plan of
degree 1 that takes no longer: a bound on these bounds it. The proof is in docs/certificates.md.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np

from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.plan_class import PlanClass, every_of_degree
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster, Device, ServerLinks, from_matrix
from stagewright.graphs.models.sharding import require_degree

Group = tuple[int, ...]


def groups_of_cluster(cluster: Cluster, degree: int) -> list[Group]:
    """Groups of consecutive devices of one server and kind; left-over devices are in no group.

    Raises InputError if no server has so many devices of one kind.
    """
    found = []
    for server in cluster.servers:
        for kind in dict.fromkeys(cluster.devices[v].kind for v in server):
            alike = _alike(cluster, server, kind)
            whole = len(alike) - len(alike) % degree
            found += [tuple(alike[i : i + degree]) for i in range(0, whole, degree)]
    if not found:
        raise InputError(f"no server of {cluster.name!r} has {degree} devices of one kind")
    return found


def cluster_of_groups(
    cluster: Cluster,
    groups: Sequence[Group],
    devices: Sequence[Device],
    pairs: Callable[[], Floats],
) -> Cluster:
    """A cluster of ``devices``, one for each of ``groups``.

    ``pairs`` makes the bandwidths and latencies of links from group to group, shape (2, G, G); it
    is asked where the links are a matrix.
    """
    name_of = {group[0]: one.name for group, one in zip(groups, devices, strict=True)}
    links = cluster.links

    def named(places: Sequence[Sequence[int]]) -> tuple[tuple[str, ...], ...]:
        found = (tuple(name_of[v] for v in place if v in name_of) for place in places)
        return tuple(one for one in found if one)

    servers = named(cluster.servers)
    if isinstance(links, ServerLinks):
        racks = links.racks and named([[cluster.index[v] for v in one] for one in links.racks])
        fewer = replace(links, servers=servers, racks=racks)
        return replace(cluster, devices=tuple(devices), links=fewer)
    bandwidth, latency = pairs()
    return from_matrix(
        devices,
        bandwidth,
        latency.tolist(),
        servers=servers,
        name=cluster.name,
        all_reduce_share=cluster.all_reduce_share,
        message_seconds=cluster.message_seconds,
        message_bytes_per_second=cluster.message_bytes_per_second,
    )


@lru_cache(maxsize=8)
def best_groups(problem: PipelineProblem, degree: int) -> PipelineProblem:
    """The problem of a shard on groups that are each the best that can be in its place.

    Of the devices of a kind in a server, the i-th group has the memory of the (i t)-th largest.
    Within a server, and between two, a link is the best of any two devices.

    Raises
    ------
    InputError
        If a layer has no costs at that degree, or no server has so many devices of one kind.
    """
    require_degree(problem.chain, 0, len(problem.chain), degree)
    cluster = problem.cluster
    groups = groups_of_cluster(cluster, degree)
    devices = [*_best_devices(cluster, groups)]
    found = cluster_of_groups(cluster, groups, devices, lambda: _best_pairs(cluster, groups))
    if not isinstance(cluster.links, ServerLinks):
        # A way over other groups may be wider than the direct link and take longer. Of ways as
        # wide as the direct link the one with the least latency counts.
        width = np.where(np.eye(len(groups), dtype=bool), 0.0, found.bandwidth)
        direct = np.stack([width, found.direct_latency])
        found = cluster_of_groups(cluster, groups, devices, lambda: direct)
    return replace(problem.at(degree), cluster=found)


def joined(devices: Sequence[Device]) -> Device:
    """A group as a device: the least of its members' memory and links to the host."""
    hosts = [one.host_bytes_per_second for one in devices]
    return replace(
        devices[0],
        name="+".join(one.name for one in devices),
        memory_bytes=min(one.memory_bytes for one in devices),
        host_bytes_per_second=None if None in hosts else min(one for one in hosts if one),
    )


def _alike(cluster: Cluster, server: Sequence[int], kind: str) -> list[int]:
    return [v for v in server if cluster.devices[v].kind == kind]


def _best_devices(cluster: Cluster, groups: Sequence[Group]) -> Iterator[Device]:
    """In the order of ``groups``, which lists all of a server and a kind one after another."""
    given = cluster.devices
    server_of = {v: server for server in cluster.servers for v in server}
    for group in groups:
        alike = _alike(cluster, server_of[group[0]], given[group[0]].kind)
        largest = sorted((given[v].memory_bytes for v in alike), reverse=True)
        hosts = [given[v].host_bytes_per_second for v in alike]
        yield replace(
            joined([given[v] for v in group]),
            memory_bytes=largest[alike.index(group[-1])],
            host_bytes_per_second=max((one for one in hosts if one is not None), default=None),
        )


def _best_pairs(cluster: Cluster, groups: Sequence[Group]) -> Floats:
    """The most bandwidth and the least latency of links between the groups' servers, (2, G, G)."""
    server_of = {v: s for s, server in enumerate(cluster.servers) for v in server}
    best = np.zeros((2, len(cluster.servers), len(cluster.servers)))
    for (a, one), (b, other) in product(enumerate(cluster.servers), repeat=2):
        apart = np.not_equal.outer(one, other)
        if apart.any():
            bandwidth, latency = cluster.pairs.block(one, other)
            best[:, a, b] = bandwidth[apart].max(), latency[apart].min()
    place = [server_of[group[0]] for group in groups]
    found = best[:, place][:, :, place]
    found[:, range(len(groups)), range(len(groups))] = 0.0
    return found


def of_groups(plans: PlanClass, degree: int) -> PlanClass | None:
    """The plans of degree 1 on groups that a class of plans of ``degree`` becomes; None if none.

    Those of ``every_of_degree`` become such; the plans of degree 1 are what they are.
    """
    sizes = plans.equal_groups
    if not every_of_degree(degree).contains(plans) or (sizes and any(n % degree for n in sizes)):
        return None
    return replace(plans, tensor=(1,), equal_groups=sizes and tuple(n // degree for n in sizes))


def on_devices(bound: Bound, degree: int) -> Bound | None:
    """A bound on plans on groups as one on plans of ``degree``; None if it speaks of none."""
    plans, sizes = bound.plans, bound.plans.equal_groups
    if degree == 1:
        return bound
    if bound.scope != "problem" or "finite" not in plans.schedules:
        return None
    kept = replace(
        plans,
        sharing="groups" if plans.sharing == "any" else plans.sharing,
        replication=tuple(kind for kind in plans.replication if kind == "split"),
        schedules=("finite",),
        equal_groups=sizes and tuple(n * degree for n in sizes),
        tensor=(degree,),
    )
    return replace(bound, plans=kept)
