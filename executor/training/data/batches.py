"""Mini-batches of a user: tensors, tuples or keywords of them, samples first."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from stagewright.executor.capture.signature import Signature, signed, taken_apart
from stagewright.executor.programs.program import plan_devices, rows
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.graphs.documents.errors import InputError

OWN = "data of each replica's own"


def replica_of(plan: PipelinePlan, device: str) -> int:
    """The replica of which ``device`` reads the samples; 0 for one that reads none.

    Raises InputError if the first and the last stage do not have the same replicas, or these other
    samples there.
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


Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]


def tensors_of_batch(name: str, batch: Batch) -> tuple[Tensor, ...]:
    """The tensors of a mini-batch; ``name`` is that of the argument in messages."""
    if isinstance(batch, Mapping):
        batch = dict(batch)
    elif not isinstance(batch, tuple | Tensor):
        raise InputError(
            f"{name} must be a tensor, a tuple or a dict of tensors, got {type(batch).__name__}"
        )
    return taken_apart(batch)[0]


def typed_inputs(batch: Batch, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Signature]:
    """The input tensors of a mini-batch, floats cast to one type, and their signature."""
    tensors, signature = signed(batch)
    typed = tuple(one.to(dtype) if one.is_floating_point() else one for one in tensors)
    return typed, signature


def require_as_many(inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Refuse inputs and targets of different numbers of samples."""
    for one in (*inputs, *targets):
        if one.dim() == 0 or len(one) != len(inputs[0]):
            raise InputError(
                f"a mini-batch needs as many samples in all its inputs and targets, got shapes "
                f"{', '.join(str(tuple(each.shape)) for each in (*inputs, *targets))}"
            )


def require_samples(inputs: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Refuse microbatches of ``sizes`` where a mini-batch has fewer samples."""
    samples = min(len(one) for one in inputs)
    if max(sizes) > samples:
        raise InputError(
            f"a microbatch of {max(sizes)} samples is asked for, the data's first mini-batch has "
            f"{samples}"
        )


def microbatch_samples(plan: PipelinePlan, inputs: Sequence[Tensor], replicas: int = 1) -> int:
    """The samples of a microbatch, from ``inputs`` of one of ``replicas`` replicas."""
    count = len(inputs[0]) * replicas
    if count == 0 or count % plan.microbatches:
        raise InputError(
            f"a mini-batch of {count} samples cannot be cut into {plan.microbatches} equal "
            "microbatches; leave a ragged last mini-batch out, or pad it"
        )
    return count // plan.microbatches


def mapped_batch(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Apply ``change`` to each tensor."""
    given = dict(batch) if isinstance(batch, Mapping) else batch
    changed: Batch = pytree.tree_map_only(Tensor, change, given)
    return changed


def on_meta(batch: Any) -> Any:
    """The same without the values of its tensors."""
    return pytree.tree_map_only(Tensor, lambda one: torch.empty_like(one, device="meta"), batch)
