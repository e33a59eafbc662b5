"""The process groups of a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from stagewright.executor.training.ranks.rank import Rank


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The groups that this rank belongs to, where there are several processes.

    Parameters
    ----------
    stages
        Per stage on several devices.
    tied
        Per tied parameter, the processes that hold it.
    """

    stages: Mapping[int, dist.ProcessGroup]
    tied: Mapping[str, dist.ProcessGroup]


def make_groups(rank: Rank, holders: Mapping[str, set[str]], timeout: timedelta) -> Groups:
    """Make the groups of all stages and tied parameters; ``holders`` are the devices of these.

    All ranks make all groups, in the same order: torch's way to make one among its members alone
    gives it different names on ranks that are in different numbers of groups.
    """
    stages = {s: frozenset(stage.devices) for s, stage in enumerate(rank.plan.stages)}
    tied = {name: frozenset(devices) for name, devices in holders.items()}
    made: dict[frozenset[str], dist.ProcessGroup] = {}
    for devices in (*stages.values(), *tied.values()):
        if len(devices) > 1 and devices not in made:
            ranks = sorted(map(rank.devices.index, devices))
            made[devices] = dist.new_group(ranks, timeout=timeout)
    mine = {devices: group for devices, group in made.items() if rank.name in devices}
    return Groups(
        {s: mine[devices] for s, devices in stages.items() if devices in mine},
        {name: mine[devices] for name, devices in tied.items() if devices in mine},
    )


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
