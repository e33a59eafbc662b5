"""Interleaved 1F1B of Megatron-LM: several stages ("model chunks") on every device."""

from functools import lru_cache

from stagewright.formulations.plans.actions import Action
from stagewright.formulations.schedules.order import B, F, Order


@lru_cache(maxsize=8)
def interleaved(ranks: int, chunks: int, microbatches: int) -> Order:
    """Interleaved 1F1B: stage s is chunk s // P on rank s mod P; with one chunk it is 1F1B.

    Microbatches pass the chunks in groups of P (Narayanan et al. 2021, section 2.2).
    """
    passes = [
        (chunk, m)
        for group in range(0, microbatches, ranks)
        for chunk in range(chunks)
        for m in range(group, min(group + ranks, microbatches))
    ]
    rows = []
    for rank in range(ranks):
        warm_up = ranks - rank - 1
        if chunks > 1:
            warm_up = 2 * warm_up + (chunks - 1) * ranks
        forwards = [Action(chunk * ranks + rank, F, m) for chunk, m in passes]
        backwards = [Action((chunks - 1 - chunk) * ranks + rank, B, m) for chunk, m in passes]
        steady = zip(forwards[warm_up:], backwards, strict=False)
        row = [*forwards[:warm_up], *(action for pair in steady for action in pair)]
        rows.append((*row, *backwards[max(0, len(forwards) - warm_up) :]))
    return Order(tuple(rows))
