"""Arrangements of devices into equal groups of a pipeline, in some order.

SPP's order of devices, cut into groups of neighbours, is the first arrangement. Where devices
differ there are others: every one of a few devices, else the order from its end and that of falling
memory, as the first stages keep the most microbatches.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.machines.ordering import recursive_device_order

MOST = 120  # arrangements of which every one is tried

Groups = tuple[tuple[int, ...], ...]


def arrangements(problem: PipelineProblem, size: int, ranks: int) -> Iterator[Groups]:
    """Disjoint groups of ``size`` devices for all ``ranks``; none that costs the same as another.

    The first is of neighbours in SPP's order.
    """
    order = recursive_device_order(problem.cluster)
    seen = set()
    few = _count(len(order), size, ranks) <= MOST
    for groups in (_neighbours(order, size, ranks), *_others(problem, order, size, ranks, few)):
        key = _costs(problem, groups, few)
        if key not in seen:
            seen.add(key)
            yield groups


def _count(devices: int, size: int, ranks: int) -> int:
    repeated: int = math.factorial(size) ** ranks
    return math.perm(devices, size * ranks) // repeated


def _neighbours(order: Sequence[int], size: int, ranks: int) -> Groups:
    return tuple(tuple(order[i * size : (i + 1) * size]) for i in range(ranks))


def _others(
    problem: PipelineProblem, order: Sequence[int], size: int, ranks: int, few: bool
) -> Iterator[Groups]:
    if few:
        yield from _every(order, size, ranks)
        return
    memory = problem.memory_bytes
    yield _neighbours(order[::-1], size, ranks)
    yield _neighbours(sorted(order, key=lambda v: -float(memory[v])), size, ranks)


def _every(devices: Sequence[int], size: int, ranks: int) -> Iterator[Groups]:
    if ranks == 0:
        yield ()
        return
    for group in combinations(devices, size):
        rest = [v for v in devices if v not in group]
        for groups in _every(rest, size, ranks - 1):
            yield (group, *groups)


def _costs(problem: PipelineProblem, groups: Groups, linked: bool) -> tuple[object, ...]:
    """Key of the costs of stages on the groups; without links, if not ``linked``."""
    cluster, devices = problem.cluster, [v for group in groups for v in group]
    kinds = tuple((cluster.devices[v].kind, float(problem.memory_bytes[v])) for v in devices)
    if not linked:
        return kinds
    links = tuple(
        (float(cluster.bandwidth[v, w]), float(cluster.latency[v, w]))
        for v in devices
        for w in devices
        if v != w
    )
    return kinds, links
