"""A model's layers, cut into the stages of a pipeline."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.models.shards import Share, Shares

Layers = tuple[tuple[Share, int], ...]
"""Layers of a stage or of a rank: how many there are of each kind."""


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
def cut(of: Shares, pipeline: int, blocks: tuple[int, ...]) -> Cut:
    """The cut with ``blocks`` in every stage: the embedding is in the first, the head in the last.

    Stage s is on rank s mod ``pipeline``.
    """
    stages: list[Layers] = []
    start = 0
    for stage, count in enumerate(blocks):
        own = Counter(of.blocks[start : start + count])
        layers = [(of.kinds[kind], n) for kind, n in sorted(own.items())]
        if stage == 0:
            layers.insert(0, (of.embedding, 1))
        if stage == len(blocks) - 1:
            layers.append((of.head, 1))
        stages.append(tuple(layers))
        start += count
    ranks = [_together(stages[rank::pipeline]) for rank in range(pipeline)]
    return Cut(_kinds(stages), _kinds(ranks))


def _together(stages: Iterable[Layers]) -> Layers:
    """The layers of several stages."""
    counts: Counter[Share] = Counter()
    for stage in stages:
        for one, n in stage:
            counts[one] += n
    return tuple(counts.items())


def _kinds(every: list[Layers]) -> Kinds:
    """Equal layers are equal objects, and in an order that is the same for equal sets."""
    keys: dict[frozenset[tuple[Share, int]], int] = {}
    index = [keys.setdefault(frozenset(one), len(keys)) for one in every]
    firsts = {kind: one for kind, one in zip(reversed(index), reversed(every), strict=True)}
    return Kinds(tuple(firsts[kind] for kind in range(len(keys))), np.array(index))
