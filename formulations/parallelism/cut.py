"""A model's layers, cut into the stages of a pipeline."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.models.shards import LayerShare, Shares

Layers = tuple[tuple[LayerShare, bool, int], ...]
"""Layers of a stage or of a rank: of each kind, whether it is recomputed, how many there are."""


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
def cut(of: Shares, pipeline: int, blocks: tuple[int, ...], recomputed: tuple[int, ...]) -> Cut:
    """The cut with ``blocks`` in every stage: the embedding is in the first, the head in the last.

    Stage s is on rank s mod ``pipeline``; its first ``recomputed`` blocks are recomputed, nothing
    else is.
    """
    stages: list[Layers] = []
    start, last = 0, len(blocks) - 1
    for stage, (count, again) in enumerate(zip(blocks, recomputed, strict=True)):
        own = of.blocks[start : start + count]
        stages.append(stage_layers(of, own, again, first=stage == 0, last=stage == last))
        start += count
    ranks = [_together(stages[rank::pipeline]) for rank in range(pipeline)]
    return Cut(_kinds(stages), _kinds(ranks))


def stage_layers(
    of: Shares, blocks: tuple[int, ...], again: int, *, first: bool, last: bool
) -> Layers:
    """The layers of a stage with ``blocks``, of which the first ``again`` are recomputed."""
    layers = [*_counted(of, blocks[:again], True), *_counted(of, blocks[again:], False)]
    if first:
        layers.insert(0, (of.embedding, False, 1))
    if last:
        layers.append((of.head, False, 1))
    return tuple(layers)


def _counted(of: Shares, blocks: tuple[int, ...], again: bool) -> Layers:
    return tuple((of.kinds[kind], again, n) for kind, n in sorted(Counter(blocks).items()))


def _together(stages: Iterable[Layers]) -> Layers:
    """The layers of several stages."""
    counts: Counter[tuple[LayerShare, bool]] = Counter()
    for stage in stages:
        for one, again, n in stage:
            counts[one, again] += n
    return tuple((one, again, n) for (one, again), n in counts.items())


def _kinds(every: list[Layers]) -> Kinds:
    """Equal layers are equal objects, whatever their order."""
    keys: dict[frozenset[tuple[LayerShare, bool, int]], int] = {}
    index = [keys.setdefault(frozenset(one), len(keys)) for one in every]
    firsts = {kind: one for kind, one in zip(reversed(index), reversed(every), strict=True)}
    return Kinds(tuple(firsts[kind] for kind in range(len(keys))), np.array(index))
