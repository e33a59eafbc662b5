"""A process as one of a plan's devices, its row of the program, and its process groups."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stagewright.executor.programs.periodic import lower_any
from stagewright.executor.programs.program import (
    Families,
    PeriodicProgram,
    Program,
    Row,
    plan_devices,
)
from stagewright.executor.programs.verification.verify import verify
from stagewright.executor.training.sharding.parallel_layers import TensorGroup
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.shards import groups_of
from stagewright.graphs.documents.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class RankPlace:
    """A process as one of several devices; ``group`` is None for a process alone.

    ``wire`` is the device of the tensors that are sent: the CPU for gloo, else ``device``.
    """

    devices: tuple[str, ...]
    number: int
    device: torch.device
    wire: torch.device
    group: dist.ProcessGroup | None

    @property
    def name(self) -> str:
        """The plan's name of the device."""
        return self.devices[self.number]


@dataclass(frozen=True, slots=True, eq=False)
class Rank(RankPlace):
    """One of the devices of a pipeline."""

    plan: PipelinePlan

    def lane(self, rank: int, stage: int, microbatch: int) -> int:
        """The place of ``rank``'s group among the groups that work on a microbatch of ``stage``."""
        place = self.plan.runners(stage, microbatch).index(self.devices[rank])
        return place // self.plan.stages[stage].tensor

    def runs(self, stage: int, microbatch: int) -> bool:
        """Whether this rank works on a microbatch of ``stage``."""
        return self.name in self.plan.runners(stage, microbatch)

    def first(self, stage: int) -> int:
        """The number of the first rank of ``stage``."""
        return self.devices.index(self.plan.stages[stage].devices[0])

    def position(self, stage: int) -> int:
        """The place of this rank in its tensor group of ``stage``."""
        one = self.plan.stages[stage]
        return one.devices.index(self.name) % one.tensor

    def is_in_first_group(self, stage: int) -> bool:
        """Whether this rank is in the first tensor group of ``stage``."""
        one = self.plan.stages[stage]
        return self.name in one.devices[: one.tensor]


@dataclass(frozen=True, slots=True, eq=False)
class RankProgram:
    """The row of a rank: one iteration, from an empty pipeline to an empty one.

    If there is a ``periodic`` program, the rank carries that out, and ``row`` covers as many
    iterations as are in flight together.
    """

    row: Row
    periodic: PeriodicProgram | None = None


def this_rank(plan: PipelinePlan, given: torch.device | str | None) -> Rank:
    """Find this process among those of torch's default group; alone if there is none.

    Raises InputError if the plan needs another number of processes.
    """
    one = this_place(plan_devices(plan), given)
    return Rank(one.devices, one.number, one.device, one.wire, one.group, plan)


def this_place(devices: tuple[str, ...], given: torch.device | str | None) -> RankPlace:
    """The same for the devices of any plan."""
    device = _device(given)
    group = dist.group.WORLD if dist.is_initialized() else None
    size = 1 if group is None else group.size()
    if size != len(devices):
        raise InputError(
            f"the plan needs {len(devices)} ranks, one for each of {', '.join(devices)}; there are "
            f"{size}"
        )
    number = 0 if group is None else group.rank()
    # Gloo sends from host memory.
    gloo = group is not None and dist.get_backend(group) == "gloo"
    wire = torch.device("cpu") if gloo else device
    return RankPlace(devices, number, device, wire, group)


def rank_program(plan: PipelinePlan, rank: int, families: Families) -> RankProgram:
    """Lower and verify ``plan``; the program of ``rank``.

    Raises InvalidPlan if the plan cannot be carried out.
    """
    program = lower_any(plan, families)
    verify(plan, program, families=families)
    if isinstance(program, Program):
        return RankProgram(program.rows[rank])
    return RankProgram(program.until_it_repeats().rows[rank], program)


def _device(given: torch.device | str | None) -> torch.device:
    if given is not None:
        device = torch.device(given)
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return device
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local % torch.cuda.device_count())


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
