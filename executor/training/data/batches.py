"""Mini-batches of a user and of a run: tensors, tuples or keywords of them, samples first."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, Sampler

from stagewright.executor.capture.signature import Signature, signed, taken_apart
from stagewright.executor.programs.program import plan_devices, rows
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.graphs.documents.errors import InputError


def begin_pass(iterable: Iterable[Any], count: int) -> tuple[Iterator[Any], int]:
    """An iterator after the first ``count`` mini-batches of a pass, and how many were skipped.

    There are fewer if the pass has fewer. An iterable may have a method ``skip(count)``, which
    makes its next iterator begin later and returns by how many. Of a ``DataLoader`` whose samples
    draw no random numbers the indices are skipped. Everything else is iterated, so that it draws
    what it drew before.
    """
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        raise InputError(
            f"the data must be an iterable of mini-batches, got {type(iterable).__name__}"
        )
    if count == 0:
        return iter(iterable), 0
    skip = getattr(iterable, "skip", None)
    if callable(skip):
        skipped = int(skip(count))
        return iter(iterable), skipped
    if isinstance(iterable, DataLoader) and _has_plain_samples(iterable):
        rest = _Rest(iterable, count)
        return iter(_like(iterable, rest)), min(count, len(iterable))
    iterator = iter(iterable)
    return iterator, sum(1 for _ in islice(iterator, count))


class _Rest(Sampler[list[int]]):
    """The batches of indices after the first ``count``."""

    def __init__(self, loader: DataLoader[Any], count: int) -> None:
        self._loader, self._count = loader, count

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self._loader.batch_sampler or ()), self._count, None)


def _has_plain_samples(loader: DataLoader[Any]) -> bool:
    """Whether a loader fetches samples by number, without random numbers; the first one is tried.

    The sampler is left alone: it may count its passes, or have a generator.
    """
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return False
    before = _random_states()
    try:
        loader.collate_fn([loader.dataset[0]])
    except Exception:  # the dataset's own code; where it matters, iterating raises it again
        return False
    finally:
        after = _random_states()
        _restore(before)
    return _plain(after) == _plain(before)


def _like(loader: DataLoader[Any], batches: _Rest) -> DataLoader[Any]:
    """The loader with other batches."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )


def _random_states() -> tuple[torch.Tensor, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one


def _plain(states: tuple[torch.Tensor, Any, Any]) -> str:
    ours, pythons, numpys = states
    return repr((ours.tolist(), pythons, numpys[1].tolist(), numpys[2:]))


def _restore(states: tuple[torch.Tensor, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002


def mini_batches(data: Callable[[], Iterable[Any]], seed: int, skipped: int = 0) -> Iterator[Any]:
    """The mini-batches of ``data`` after the first ``skipped``, pass after pass, without end.

    They have a separate random state: draws of the executor differ from rank to rank, and all ranks
    must see the same mini-batches. Raises InputError if a pass is empty.
    """
    draws = torch.Generator().manual_seed(seed)
    while True:
        with _drawing_from(draws):
            batches, count = begin_pass(data(), skipped)
        skipped, is_empty = skipped - count, count == 0
        for batch in _drawn(batches, draws):
            is_empty = False
            yield batch
        if is_empty:
            raise InputError("the data hold no mini-batch")


def one_pass(data: Callable[[], Iterable[Any]], seed: int) -> Iterator[Any]:
    """The mini-batches of one pass of ``data``, each time the same; see `mini_batches`."""
    draws = torch.Generator().manual_seed(seed)
    with _drawing_from(draws):
        batches, _ = begin_pass(data(), 0)
    return _drawn(batches, draws)


def _drawn(batches: Iterator[Any], draws: torch.Generator) -> Iterator[Any]:
    """The rest of ``batches``, which draw from ``draws``."""
    end = object()
    while True:
        with _drawing_from(draws):
            batch = next(batches, end)
        if batch is end:
            return
        yield batch


@contextmanager
def _drawing_from(draws: torch.Generator) -> Iterator[None]:
    """Let torch draw from ``draws``, and leave its own state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(draws.get_state())
        try:
            yield
        finally:
            draws.set_state(torch.get_rng_state())


def pair(batch: Any, *, has_loss: bool = True) -> tuple[Any, Any]:
    """A mini-batch as (inputs, targets).

    Keywords alone are the model's inputs; a loss, if there is one, is given them as targets. Raises
    InputError if it is neither a pair nor a mapping.
    """
    if isinstance(batch, Mapping):
        return dict(batch), dict(batch) if has_loss else ()
    if not (isinstance(batch, list | tuple) and len(batch) == 2):
        raise InputError(
            "the data must be pairs (inputs, targets) or dicts of the model's keywords, got "
            f"{type(batch).__name__}"
        )
    inputs, targets = batch  # torch's loaders make lists of what was a tuple
    return tuple(inputs) if isinstance(inputs, list) else inputs, targets


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
