"""Every pipeline of a model's blocks: ranks, chunks, and the blocks of the first and last stage.

Between the ends all stages have equally many blocks: an even share k = floor(L / S), or one more.
The ends have as many where the blocks can be divided evenly, or else any two numbers from 0 to
k + 1 that leave k + 1 to each of the others. Two stages are divided in any way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagewright.formulations.parallelism.layout import Schedule
from stagewright.formulations.parallelism.pipeline_time import first_forwards, kept_forwards
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.documents.units import MAX_MICROBATCHES

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


@dataclass(frozen=True, eq=False)
class Table:
    """All divisions in flat arrays: one entry per chunk of every rank, rank by rank.

    ``starts`` and ``stops`` are positions in the model's layers (0 is the embedding, the last the
    head), ``blocks`` those of the stage; these, ``rank_of`` and ``chunk_of`` belong to the entries.
    ``begins`` of every (division, rank) is the start of its first stage.
    """

    every: tuple[Division, ...]
    pipeline: Ints
    chunks: Ints
    begins: Ints
    starts: Ints
    stops: Ints
    blocks: Ints
    rank_of: Ints
    chunk_of: Ints

    def only(self, kept: Bools) -> "Table":
        """The divisions that are ``kept``."""
        ranks, entries = kept[self.division_of_rank], kept[self.division_of_entry]
        return Table(
            every=tuple(self.every[one] for one in np.flatnonzero(kept)),
            pipeline=self.pipeline[kept],
            chunks=self.chunks[kept],
            begins=self.begins[ranks],
            starts=self.starts[entries],
            stops=self.stops[entries],
            blocks=self.blocks[entries],
            rank_of=self.rank_of[entries],
            chunk_of=self.chunk_of[entries],
        )

    @cached_property
    def first_rank(self) -> Ints:
        """The first of the (division, rank) of every division."""
        return _offsets(self.pipeline)

    @cached_property
    def _entries(self) -> Ints:
        """How many entries every (division, rank) has."""
        return np.repeat(self.chunks, self.pipeline)

    @cached_property
    def first_entry(self) -> Ints:
        """The first entry of every (division, rank)."""
        return _offsets(self._entries)

    @cached_property
    def rank_of_entry(self) -> Ints:
        """The (division, rank) of every entry."""
        return np.repeat(np.arange(len(self._entries)), self._entries)

    @cached_property
    def division_of_rank(self) -> Ints:
        """The division of every (division, rank)."""
        return np.repeat(np.arange(len(self.every)), self.pipeline)

    @cached_property
    def division_of_entry(self) -> Ints:
        """The division of every entry."""
        return np.repeat(np.arange(len(self.every)), self.pipeline * self.chunks)

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


def table_of(every: list[Division]) -> Table:
    """The table of some divisions, at least one."""
    starts, stops, blocks, ranks, chunks, begins = [], [], [], [], [], []
    for one in every:
        counts = np.array(one.blocks)
        bounds = np.concatenate(([0], 1 + np.cumsum(counts)))
        bounds[-1] += 1
        stage = np.arange(len(counts)).reshape(one.chunks, one.pipeline).T.ravel()
        starts.append(bounds[stage])
        stops.append(bounds[stage + 1])
        blocks.append(counts[stage])
        ranks.append(np.repeat(np.arange(one.pipeline), one.chunks))
        chunks.append(np.tile(np.arange(one.chunks), one.pipeline))
        begins.append(bounds[: one.pipeline])
    return Table(
        every=tuple(every),
        pipeline=np.array([one.pipeline for one in every]),
        chunks=np.array([one.chunks for one in every]),
        begins=np.concatenate(begins),
        starts=np.concatenate(starts),
        stops=np.concatenate(stops),
        blocks=np.concatenate(blocks),
        rank_of=np.concatenate(ranks),
        chunk_of=np.concatenate(chunks),
    )


@dataclass(frozen=True, eq=False)
class Sized:
    """The divisions that a microbatch of ``samples`` and a schedule allow.

    ``data`` and ``microbatches`` are the replicas of every division, and the microbatches of each;
    with ``split`` weight gradients are put off.
    """

    table: Table
    samples: int
    data: Ints
    microbatches: Ints
    split: bool

    @cached_property
    def flying(self) -> Floats:
        """The samples that every entry keeps; see ``pipeline_time.kept_forwards``."""
        return self.samples * kept_forwards(*self._sizes).astype(np.float64)

    @cached_property
    def flying_with_blocks(self) -> Floats:
        """The samples that every rank keeps of stages with blocks."""
        return self.table.sum_by_rank(self.flying * (self.table.blocks > 0))

    @cached_property
    def flying_blocks(self) -> Floats:
        """Of every rank, samples times blocks that it keeps."""
        return self.table.sum_by_rank(self.flying * self.table.blocks)

    @cached_property
    def first_forwards(self) -> Floats:
        """Per entry, the forwards before the first backward; see ``pipeline_time``."""
        return first_forwards(*self._sizes).astype(np.float64)

    @cached_property
    def of_rank(self) -> Ints:
        """The microbatches of every rank."""
        found: Ints = self.microbatches[self.table.division_of_rank]
        return found

    @property
    def _sizes(self) -> tuple[Ints, Ints, Ints, bool, Ints, Ints]:
        table, of = self.table, self.table.division_of_entry
        sizes = (each[of] for each in (table.pipeline, table.chunks, self.microbatches))
        p, v, m = sizes
        return p, v, m, self.split, table.rank_of, table.chunk_of


def sized(table: Table, left: int, batch: int, samples: int, schedule: Schedule) -> Sized | None:
    """The divisions of ``left`` ranks that the rules on microbatches allow; None if there are none.

    A replica has a whole number of microbatches, with chunks a multiple of its pipeline's ranks.
    """
    data = left // table.pipeline
    m = batch // (samples * data)
    whole = batch % (samples * data) == 0
    in_groups = (table.chunks == 1) | (m % table.pipeline == 0)
    bubbles = (table.pipeline > 1) | (schedule == "1f1b")
    kept = whole & (m > 0) & (m <= MAX_MICROBATCHES) & in_groups & bubbles
    if not kept.any():
        return None
    return Sized(table.only(kept), samples, data[kept], m[kept], schedule == "zero-bubble")


def _prefix(of_layers: Floats) -> Floats:
    """Sums over the layers before each, and over all."""
    found: Floats = np.concatenate(([0.0], np.cumsum(of_layers)))
    return found


def _offsets(sizes: Ints) -> Ints:
    found: Ints = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    return found
