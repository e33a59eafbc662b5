"""A model's layers, cut into the stages of a pipeline."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from stagewright.formulations.parallelism.schedules import stages_of_ranks
from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.models.shards import LayerShare, Recompute, Shares

Layers = tuple[tuple[LayerShare, Recompute, int], ...]
"""Layers of a stage or of a rank: of each kind, how it is treated, how many there are."""


@dataclass(frozen=True, eq=False, slots=True)
class Kinds:
    """Sets of layers that are equal are one kind; ``index`` is the kind of each."""

    layers: tuple[Layers, ...]
    index: Ints


@dataclass(frozen=True, eq=False, slots=True)
class Cut:
    """The layers of every stage, and of every rank's stages together."""

    stages: Kinds
    ranks: Kinds


@lru_cache(maxsize=4096)
def cut(
    of: Shares,
    ranks: int,
    blocks: tuple[int, ...],
    treated: tuple[int, ...],
    treatment: Recompute,
    in_v: bool,
) -> Cut:
    """The cut with ``blocks`` in every stage: the embedding is in the first, the head in the last.

    Stage s is on rank s mod ``ranks``, or with ``in_v`` the last of S is with the first, and so on;
    its first ``treated`` blocks have the ``treatment``, nothing else has.
    """
    stages: list[Layers] = []
    start, last = 0, len(blocks) - 1
    for stage, (count, first) in enumerate(zip(blocks, treated, strict=True)):
        own = of.blocks[start : start + count]
        ends = {"first": stage == 0, "last": stage == last}
        stages.append(stage_layers(of, own, first, treatment, **ends))
        start += count
    placed = stages_of_ranks(ranks, len(blocks) // ranks, in_v)
    by_rank = [_together(stages[stage] for stage in row) for row in placed]
    return Cut(_kinds(stages), _kinds(by_rank))


@lru_cache(maxsize=1 << 14)
def stage_layers(
    of: Shares,
    blocks: tuple[int, ...],
    treated: int,
    treatment: Recompute,
    *,
    first: bool,
    last: bool,
) -> Layers:
    """The layers of a stage with ``blocks``, of which the first ``treated`` have the treatment."""
    layers = [
        *_counted(of, blocks[:treated], treatment),
        *_counted(of, blocks[treated:], "none"),
    ]
    if first:
        layers.insert(0, (of.embedding, "none", 1))
    if last:
        layers.append((of.head, "none", 1))
    return tuple(layers)


def _counted(of: Shares, blocks: tuple[int, ...], treatment: Recompute) -> Layers:
    return tuple((of.kinds[kind], treatment, n) for kind, n in sorted(Counter(blocks).items()))


def _together(stages: Iterable[Layers]) -> Layers:
    """The layers of several stages."""
    counts: Counter[tuple[LayerShare, Recompute]] = Counter()
    for stage in stages:
        for one, treatment, n in stage:
            counts[one, treatment] += n
    return tuple((*kind, n) for kind, n in counts.items())


def _kinds(every: list[Layers]) -> Kinds:
    """Equal layers are equal objects, whatever their order."""
    keys: dict[frozenset[tuple[LayerShare, Recompute, int]], int] = {}
    index = [keys.setdefault(frozenset(one), len(keys)) for one in every]
    firsts = {kind: one for kind, one in zip(reversed(index), reversed(every), strict=True)}
    return Kinds(tuple(firsts[kind] for kind in range(len(keys))), np.array(index))
