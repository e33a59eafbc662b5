"""Every pipeline of a model's blocks: ranks, chunks, and the blocks of the first and last stage.

Between the ends all stages have equally many blocks: an even share k = floor(L / S), or one more.
The ends have as many where the blocks can be divided evenly, or else any two numbers from 0 to
k + 1 that leave k + 1 to each of the others. Two stages are divided in any way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagewright.formulations.parallelism.pipeline_time import first_forwards, kept_forwards
from stagewright.graphs.documents.arrays import Floats, Ints

Ends = tuple[int | None, int | None]


@dataclass(frozen=True)
class Division:
    """One pipeline; ``blocks`` are those of every stage."""

    pipeline: int
    chunks: int
    ends: Ends
    blocks: tuple[int, ...]


def divisions(blocks: int, pipelines: list[int], most_chunks: int) -> list[Division]:
    """All pipelines with one of the numbers of ranks and at most ``most_chunks`` chunks."""
    found = []
    for pipeline in pipelines:
        for chunks in range(1, 1 + (most_chunks if pipeline > 1 else 1)):
            stages = pipeline * chunks
            if stages > blocks + 2:
                break
            for ends in _ends(blocks, stages):
                found.append(Division(pipeline, chunks, ends, _counts(blocks, stages, ends)))
    return found


def _ends(blocks: int, stages: int) -> Iterator[Ends]:
    """The ends that the module's rule allows; None for as many blocks as in the other stages."""
    if blocks % stages == 0:
        yield None, None
    if stages == 1:
        return
    each = blocks // stages + 1
    together = blocks - (stages - 2) * each
    most = blocks if stages == 2 else each
    for first in range(max(0, together - most), min(most, together) + 1):
        if (first, together - first) != (blocks / stages, blocks / stages):
            yield first, together - first


def _counts(blocks: int, stages: int, ends: Ends) -> tuple[int, ...]:
    if stages == 1:
        return (blocks,)
    first, last = ends
    if first is None or last is None:
        return (blocks // stages,) * stages
    middle = (blocks - first - last) // (stages - 2) if stages > 2 else 0
    return (first, *(middle,) * (stages - 2), last)


class Table:
    """All divisions in flat arrays: one entry per chunk of every rank, rank by rank.

    ``starts`` and ``stops`` are positions in the model's layers (0 is the embedding, the last the
    head). ``rank_of`` and ``chunk_of`` belong to the entries, as ``rank_of_entry``, the (division,
    rank); ``first_entry`` is the first entry of every (division, rank), ``first_rank`` the first of
    those of every division.
    """

    def __init__(self, every: list[Division]) -> None:
        self.every = every
        starts, stops, ranks, chunks, begins = [], [], [], [], []
        for one in every:
            bounds = np.concatenate(([0], 1 + np.cumsum(one.blocks)))
            bounds[-1] += 1
            stage = np.arange(len(one.blocks)).reshape(one.chunks, one.pipeline).T.ravel()
            starts.append(bounds[stage])
            stops.append(bounds[stage + 1])
            ranks.append(np.repeat(np.arange(one.pipeline), one.chunks))
            chunks.append(np.tile(np.arange(one.chunks), one.pipeline))
            begins.append(bounds[: one.pipeline])
        self.starts, self.stops = np.concatenate(starts), np.concatenate(stops)
        self.rank_of, self.chunk_of = np.concatenate(ranks), np.concatenate(chunks)
        self.begins = np.concatenate(begins)
        self.pipeline = np.array([one.pipeline for one in every])
        self.chunks = np.array([one.chunks for one in every])
        self.first_rank = _offsets(self.pipeline)
        per_rank = np.repeat(self.chunks, self.pipeline)
        self.first_entry = _offsets(per_rank)
        self.rank_of_entry = np.repeat(np.arange(len(per_rank)), per_rank)
        self.division_of_rank = np.repeat(np.arange(len(every)), self.pipeline)
        self.division_of_entry = self.division_of_rank[self.rank_of_entry]

    @cached_property
    def rank(self) -> Ints:
        """The position in the pipeline of every (division, rank)."""
        found: Ints = self.rank_of[self.first_entry]
        return found

    def by_rank(self, of_layers: Floats) -> Floats:
        """Sums of a quantity of the layers over every rank's stages."""
        return self.sum_by_rank(self.by_entry(of_layers))

    def by_entry(self, of_layers: Floats) -> Floats:
        """Sums of a quantity of the layers over every stage."""
        prefix = _prefix(of_layers)
        found: Floats = prefix[self.stops] - prefix[self.starts]
        return found

    @cached_property
    def blocks(self) -> Ints:
        """The blocks of every entry's stage."""
        found: Ints = np.concatenate(
            [np.array(one.blocks).reshape(one.chunks, one.pipeline).T.ravel() for one in self.every]
        )
        return found

    @cached_property
    def most_blocks(self) -> Ints:
        """The blocks of every division's largest stage."""
        return np.array([max(one.blocks) for one in self.every])

    def sum_by_rank(self, of_entries: Floats) -> Floats:
        """Sums of the entries of every rank."""
        found: Floats = np.add.reduceat(of_entries, self.first_entry)
        return found

    def before(self, of_layers: Floats) -> Floats:
        """Sums over the layers before every rank's first stage."""
        prefix = _prefix(of_layers)
        found: Floats = prefix[self.begins]
        return found

    def after(self, of_layers: Floats) -> Floats:
        """Sums over the layers after every rank's last stage."""
        prefix = _prefix(of_layers)
        last = self.first_entry + self.chunks[self.division_of_rank] - 1
        found: Floats = prefix[-1] - prefix[self.stops[last]]
        return found

    def most(self, of_ranks: Floats) -> Floats:
        """The greatest of every division's ranks."""
        found: Floats = np.maximum.reduceat(of_ranks, self.first_rank)
        return found

    def in_flight(self, microbatches: Ints, split: bool) -> Floats:
        """Per entry, the forwards that are kept; see ``pipeline_time.kept_forwards``."""
        return kept_forwards(*self._sizes(microbatches, split)).astype(np.float64)

    def first_forwards(self, microbatches: Ints, split: bool) -> Floats:
        """Per entry, the forwards before the first backward; see ``pipeline_time``."""
        return first_forwards(*self._sizes(microbatches, split)).astype(np.float64)

    def _sizes(self, microbatches: Ints, split: bool) -> tuple[Ints, Ints, Ints, bool, Ints, Ints]:
        p, v = (of[self.division_of_entry] for of in (self.pipeline, self.chunks))
        return p, v, microbatches[self.division_of_entry], split, self.rank_of, self.chunk_of


def _prefix(of_layers: Floats) -> Floats:
    """Sums over the layers before each, and over all."""
    found: Floats = np.concatenate(([0.0], np.cumsum(of_layers)))
    return found


def _offsets(sizes: Ints) -> Ints:
    found: Ints = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    return found
