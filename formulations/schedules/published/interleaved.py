"""Interleaved 1F1B of Megatron-LM: several stages ("model chunks") on every device."""

from collections.abc import Sequence
from functools import lru_cache

from stagewright.formulations.plans.actions import Action
from stagewright.formulations.schedules.order import B, F, Order
from stagewright.graphs.documents.errors import InputError


@lru_cache(maxsize=8)
def interleaved(ranks: int, chunks: int, microbatches: int) -> Order:
    """Interleaved 1F1B: stage s is chunk s // P on rank s mod P; with one chunk it is 1F1B.

    Microbatches pass the chunks in groups of P (Narayanan et al. 2021, section 2.2). The bubble is
    (p - 1) / (v m) of the work.

    Raises
    ------
    InputError
        If ``microbatches`` is not a multiple of ``ranks`` and there are several chunks.
    """
    if chunks > 1 and microbatches % ranks:
        below = microbatches // ranks * ranks
        near = f"{below} or {below + ranks}" if below else f"{ranks}"
        raise InputError(
            f"interleaved 1F1B needs a multiple of {ranks} microbatches (the devices), got "
            f"{microbatches}; the nearest are {near}"
        )
    return _by_groups(ranks, chunks, groups_of(ranks, microbatches))


@lru_cache(maxsize=8)
def ragged_interleaved(ranks: int, chunks: int, microbatches: int) -> Order:
    """Interleaved 1F1B for any number of microbatches: max(1, m // p) groups of nearly equal size.

    The larger groups come first. Where m is a multiple of p it is Megatron's order, where m is a
    multiple of the number of groups torch's ("flexible" interleaving).
    """
    return _by_groups(ranks, chunks, groups_of(ranks, microbatches))


def groups_of(ranks: int, microbatches: int) -> tuple[int, ...]:
    """The sizes of max(1, m // p) groups of nearly equal size, the larger ones first."""
    rounds = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, rounds)
    return (size + 1,) * larger + (size,) * (rounds - larger)


def passes_of(chunks: int, groups: Sequence[int]) -> list[tuple[int, int]]:
    """The (chunk, microbatch) pairs in the order in which a device does their forwards."""
    passes: list[tuple[int, int]] = []
    first = 0
    for size in groups:
        group = range(first, first + size)
        passes += [(chunk, m) for chunk in range(chunks) for m in group]
        first += size
    return passes


def _by_groups(ranks: int, chunks: int, groups: Sequence[int]) -> Order:
    passes = passes_of(chunks, groups)
    rows = []
    for rank in range(ranks):
        warm_up = ranks - rank - 1
        if chunks > 1:
            warm_up = 2 * warm_up + (chunks - 1) * groups[0]
        forwards = [Action(chunk * ranks + rank, F, m) for chunk, m in passes]
        backwards = [Action((chunks - 1 - chunk) * ranks + rank, B, m) for chunk, m in passes]
        steady = zip(forwards[warm_up:], backwards, strict=False)
        row = [*forwards[:warm_up], *(action for pair in steady for action in pair)]
        rows.append((*row, *backwards[max(0, len(forwards) - warm_up) :]))
    return Order(tuple(rows))
