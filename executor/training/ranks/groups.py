"""The process groups of a plan."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stagewright.executor.training.ranks.rank import Rank, RankPlace
from stagewright.executor.training.sharding.parallel_layers import TensorGroup
from stagewright.formulations.plans.shards import groups_of

T = TypeVar("T")


def gathered(place: RankPlace, own: T) -> list[T] | None:
    """Every rank's value, on rank 0; None on the other ranks. All ranks call this function."""
    if place.group is None:
        return [own]
    shares: list[Any] | None = [None] * len(place.devices) if place.number == 0 else None
    dist.gather_object(own, shares, group=place.group, group_dst=0)
    return shares


def summed(
    place: RankPlace, values: tuple[float, ...], group: dist.ProcessGroup | None
) -> tuple[float, ...]:
    """The sums of ``values`` over the processes of ``group``; None is this process alone."""
    if group is None:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=place.wire)
    dist.all_reduce(total, group=group)
    return tuple(total.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class RankGroups:
    """The groups that this rank belongs to, where there are several processes.

    ``stages``: per stage with several replicas, those with this rank's shard. ``tied``: per tied
    parameter, the processes that hold it. ``tensor``: per stage of a tensor degree above 1, those
    that compute its layers together.
    """

    stages: Mapping[int, dist.ProcessGroup]
    tied: Mapping[str, dist.ProcessGroup]
    tensor: Mapping[int, TensorGroup]


def make_groups(rank: Rank, holders: Mapping[str, set[str]], timeout: timedelta) -> RankGroups:
    """Make the groups of all stages and tied parameters; ``holders`` are the devices of these.

    All ranks make all groups, in the same order: torch's way to make one among its members alone
    gives it different names on ranks that are in different numbers of groups.
    """
    reducing, together = [], []
    for stage in rank.plan.stages:
        degree = stage.tensor
        reducing.append([stage.devices[i::degree] for i in range(degree)])
        together.append(groups_of(stage.devices, degree))
    shared = (devices for one in reducing for devices in one)
    tied = {name: tuple(sorted(devices)) for name, devices in holders.items()}
    made = _mine(rank, [*shared, *tied.values()], timeout)
    # Not the groups of all-reduces: collectives of computations and of gradients overlap.
    tensor = _mine(rank, [devices for one in together for devices in one], timeout)
    return RankGroups(
        _by_stage(reducing, made),
        {name: made[key] for name, devices in tied.items() if (key := frozenset(devices)) in made},
        {s: _in_order(rank, s, group) for s, group in _by_stage(together, tensor).items()},
    )


def _in_order(rank: Rank, s: int, processes: dist.ProcessGroup) -> TensorGroup:
    """The tensor group of this rank in stage ``s``, by the places in the plan."""
    stage = rank.plan.stages[s]
    own = next(one for one in groups_of(stage.devices, stage.tensor) if rank.name in one)
    ranks = [rank.devices.index(name) for name in own]
    return TensorGroup(processes, rank.position(s), [sorted(ranks).index(one) for one in ranks])


def _mine(
    rank: Rank, groups: Iterable[Sequence[str]], timeout: timedelta
) -> dict[frozenset[str], dist.ProcessGroup]:
    """Make the groups of several devices, in their order; those of this rank."""
    made: dict[frozenset[str], dist.ProcessGroup] = {}
    for devices in groups:
        if len(devices) > 1 and frozenset(devices) not in made:
            ranks = [rank.devices.index(name) for name in devices]
            made[frozenset(devices)] = dist.new_group(sorted(ranks), timeout=timeout)
    return {devices: group for devices, group in made.items() if rank.name in devices}


def _by_stage(
    groups: Iterable[Iterable[Sequence[str]]], made: Mapping[frozenset[str], dist.ProcessGroup]
) -> dict[int, dist.ProcessGroup]:
    return {
        s: made[key]
        for s, one in enumerate(groups)
        for devices in one
        if (key := frozenset(devices)) in made
    }


def make_loss_group(rank: Rank, timeout: timedelta) -> dist.ProcessGroup | None:
    """The processes that normalise a loss together; on gloo, as the numbers are on the host."""
    devices: Sequence[str] = rank.devices
    if rank.plan.weight_rule.updates_every_round:
        devices = rank.plan.stages[-1].runners(0)
    if len(devices) == 1:
        return None
    ranks = [rank.devices.index(name) for name in devices]
    group = dist.new_group(sorted(ranks), timeout=timeout, backend="gloo")
    return group if rank.number in ranks else None
