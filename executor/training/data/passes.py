"""The mini-batches of a run, as its ranks take them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from stagewright.executor.training.data.skipping import begin_pass
from stagewright.graphs.documents.errors import InputError


def mini_batches(data: Callable[[], Iterable[Any]], seed: int, skipped: int = 0) -> Iterator[Any]:
    """The mini-batches of ``data`` after the first ``skipped``, pass after pass, without end.

    They have a separate random state: draws of the executor differ from rank to rank, and all ranks
    must see the same mini-batches.

    Raises
    ------
    InputError
        If a pass is empty.
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

    Keywords alone are the model's inputs; a loss, if there is one, is given them as targets.

    Raises
    ------
    InputError
        If it is neither a pair nor a mapping.
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
