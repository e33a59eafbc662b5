"""The ranks that read mini-batches, and the samples that each reads."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from stagewright.executor.programs.program import plan_devices
from stagewright.executor.programs.shares import rows
from stagewright.executor.training.data.batches import on_meta
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.graphs.documents.errors import InputError

OWN = "data of each replica's own"


def replica_of(plan: PipelinePlan, device: str) -> int:
    """The replica of which ``device`` reads the samples; 0 for one that reads none.

    Raises
    ------
    InputError
        If the first and the last stage do not have the same replicas, or these other samples there.
    """
    first, last = plan.stages[0], plan.stages[-1]
    if (first.replication, first.replicas) != (last.replication, last.replicas):
        raise InputError(
            f"{OWN} needs as many replicas in the last stage as in the first, the plan has "
            f"{last.replicas} ({last.replication}) and {first.replicas} ({first.replication})"
        )
    if plan.microbatches % first.turns:
        raise InputError(
            f"{OWN} needs as many microbatches for each of {first.turns} replicas, the plan has "
            f"{plan.microbatches}"
        )
    # So many samples divide evenly, and so do their pieces.
    lanes = rows(plan, prod(stage.replicas for stage in plan.stages))
    places = {_lane(stage, device) for stage in (first, last) if device in stage.devices}
    if lanes[0] != lanes[-1] or len(places) > 1:
        raise InputError(
            f"{OWN} needs replicas that have the same samples in the first and the last stage: let "
            "all stages run on the same devices in the same order, or take turns (round-robin)"
        )
    return places.pop() if places else 0


def _lane(stage: Stage, device: str) -> int:
    return stage.devices.index(device) // stage.tensor


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """How this rank gets mini-batches: it reads them, or is told of their shapes by rank 0.

    ``told`` are rank 0 and those that read none.
    """

    number: int
    reads: bool
    told: dist.ProcessGroup | None

    def each(self, batches: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """The mini-batches, equally many on all ranks; without values on ranks that do not read."""
        if not self.reads:
            while (outline := self._told(None)) is not None:
                yield outline
            return
        for batch in batches():
            self._tell(batch)
            yield batch
        self._tell(None)

    def _tell(self, batch: Any) -> None:
        if self.told is not None and self.number == 0:
            self._told(None if batch is None else on_meta(batch))

    def _told(self, outline: Any) -> Any:
        known = [outline]
        dist.broadcast_object_list(known, src=0, group=self.told, device=torch.device("cpu"))
        return known[0]


def readers_of(plan: PipelinePlan, number: int) -> Readers:
    """Ranks with the first or the last stage read; all ranks call it."""
    reading = {*plan.stages[0].devices, *plan.stages[-1].devices}
    devices = plan_devices(plan)
    others = [rank for rank, name in enumerate(devices) if name not in reading]
    # On gloo, as shapes are on the host.
    told = dist.new_group([0, *others], backend="gloo") if others else None
    is_told = number == 0 or number in others
    return Readers(number, devices[number] in reading, told if is_told else None)
