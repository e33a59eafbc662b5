"""Mini-batches that an earlier run has seen, skipped without fetching their samples if possible."""

import random
from collections.abc import Iterable, Iterator
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
