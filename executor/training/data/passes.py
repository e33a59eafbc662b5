"""The mini-batches of a run, as its ranks take them."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

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
