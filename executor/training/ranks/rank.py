"""A process as one of a plan's devices, and its row of the program."""

import os
from dataclasses import dataclass

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
from stagewright.formulations.plans.plan import PipelinePlan
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
