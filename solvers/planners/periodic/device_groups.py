"""Groups of devices for the stages of periodic plans; all groups have the same size."""

from collections.abc import Sequence

import numpy as np

from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.solvers.planners.steps.proposal import Choices

Groups = tuple[tuple[int, ...], ...]


def group_sizes(problem: PipelineProblem, choices: Choices) -> list[int]:
    """The possible numbers of devices per stage, which is the same for all stages."""
    devices, layers = len(problem.cluster), len(problem.chain)
    most = min(devices, problem.most_replicas(0, layers))
    if choices.group_size is None:
        return list(range(1, most + 1))
    if not 1 <= choices.group_size <= most:
        raise InputError(
            f"group size {choices.group_size}: a stage can have 1 to {most} devices; the cluster "
            f"has {devices}, and a microbatch has samples for {problem.most_replicas(0, layers)}"
        )
    return [choices.group_size]


def longest_update(problem: PipelineProblem) -> float:
    """The longest update time of a layer."""
    return max(float(problem.update_per_layer(kind).max()) for kind in problem.kinds)


def orders(problem: PipelineProblem, size: int) -> list[Groups]:
    """Groups of neighbouring devices in the order of the recursive cuts, and reversed."""
    order = recursive_device_order(problem.cluster)
    last = len(order) - len(order) % size
    groups = tuple(tuple(sorted(order[i : i + size])) for i in range(0, last, size))
    return [groups] if len(distinct(problem, groups)) == 1 else [groups, groups[::-1]]


def distinct(problem: PipelineProblem, groups: Groups) -> list[int]:
    """One group of each type: all groups if links differ, else one per type of devices."""
    if not _links_are_equal(problem.cluster):
        return list(range(len(groups)))
    sorts = [tuple(_machine(problem, v) for v in group) for group in groups]
    return [g for g, sort in enumerate(sorts) if sorts.index(sort) == g]


def interchangeable(problem: PipelineProblem, size: int) -> bool:
    """Whether it does not matter which devices form a group of ``size``.

    Otherwise a bound for one partition into groups says nothing about the others, even if the
    groups of that partition are alike or there is only one.
    """
    devices = len(problem.cluster)
    if size == devices:
        return True
    machines = {_machine(problem, v) for v in range(devices)}
    return len(machines) == 1 and _links_are_equal(problem.cluster)


def _machine(problem: PipelineProblem, device: int) -> tuple[str, float]:
    """The kind and the memory of a device."""
    return problem.cluster.devices[device].kind, float(problem.memory_bytes[device])


def _links_are_equal(cluster: Cluster) -> bool:
    """Whether all pairs of devices have the same bandwidth and latency."""
    every = range(len(cluster))
    slowest = cluster.pairs.slowest(every, every)
    return cluster.pairs.best_between(np.array(every)) in (None, slowest)


def named_group(problem: PipelineProblem, group: Sequence[int]) -> tuple[str, ...]:
    """The names of a group's devices."""
    return tuple(problem.cluster.devices[v].name for v in group)
