"""Every pipeline of a model's blocks: ranks, chunks, and the blocks of the first and last stage.

Between the ends all stages have equally many blocks, at least one; the ends have any number. Some
divisions are nearly even: as many blocks in all stages, or k + 1 in the stages between the ends and
at most as many in the ends, for k = floor(L / S); if there are none, one with k between the ends
and ends that are alike. Two stages are always nearly even. There are up to L^2 divisions for every
number of ranks, and few are nearly even; the search looks at the others by groups with one number
of blocks between the ends. Of a schedule with two copies of every stage, the ranks are those of one
copy, and every copy counts as a replica.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from stagewright.formulations.parallelism.schedules import FORMS, Schedule
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.documents.units import MAX_MICROBATCHES

_Divided = TypeVar("_Divided", "DivisionGroups", "DivisionTable")


@dataclass(frozen=True, eq=False)
class DivisionGroups:
    """Arrays by group: its ranks, chunks, and the blocks of every stage but the first and last."""

    layers: int
    in_v: bool
    pipeline: Ints
    chunks: Ints
    middle: Ints

    def only(self, kept: Bools | Ints) -> "DivisionGroups":
        """The groups that are ``kept``."""
        return _only(self, kept)

    @cached_property
    def stages(self) -> Ints:
        """The number of stages of every group, on all ranks together."""
        found: Ints = self.pipeline * self.chunks
        return found

    @cached_property
    def ends(self) -> Ints:
        """The blocks of the first and the last stage together."""
        found: Ints = self.layers - np.maximum(self.stages - 2, 0) * self.middle
        return found

    @cached_property
    def divisions(self) -> Ints:
        """The number of divisions in every group: one for every number of first-stage blocks."""
        return np.where(self.stages == 1, 1, self.ends + 1)

    def table(self) -> "DivisionTable":
        """The divisions of all groups."""
        of = np.repeat(np.arange(len(self.middle)), self.divisions)
        first = np.arange(len(of)) - _offsets(self.divisions)[of]
        first = np.where(self.stages[of] == 1, self.layers, first)
        return DivisionTable(
            layers=self.layers,
            in_v=self.in_v,
            pipeline=self.pipeline[of],
            chunks=self.chunks[of],
            first=first,
            middle=self.middle[of],
            last=self.ends[of] - first,
            size=np.zeros_like(of),
        )


def groups(
    layers: int, pipelines: Iterable[int], chunks: Callable[[int], Iterable[int]], *, in_v: bool
) -> DivisionGroups:
    """All pipelines with one of the numbers of ranks, and of the ``chunks`` for that."""
    found = [
        (pipeline, each, middle)
        for pipeline in pipelines
        for each in chunks(pipeline)
        for middle in _middles(layers, pipeline * each)
    ]
    return DivisionGroups(layers, in_v, *np.array(found, dtype=np.int64).reshape(-1, 3).T)


def _middles(layers: int, stages: int) -> range:
    """The blocks that stages between the ends may have; 0 if there are no such stages."""
    return range(1) if stages <= 2 else range(1, layers // (stages - 2) + 1)


@dataclass(frozen=True, eq=False)
class DivisionTable:
    """Divisions of ``layers`` blocks in flat arrays.

    Fields have the blocks of the first stage, of every one between the ends, and of the last; a
    single stage is the first. ``size`` is the place of the samples of a microbatch in a list; the
    quantities of layers are (L + 2,), or (sizes, L + 2) if they depend on it.
    Other arrays have an entry per chunk of every rank, rank by rank.
    ``starts`` and ``stops`` are positions in the model's layers (0 is the embedding, the last the
    head), ``blocks`` those of the stage; these, ``rank_of`` and ``chunk_of`` belong to the entries.
    Stages are placed in a loop, or ``in_v``.
    """

    layers: int
    in_v: bool
    pipeline: Ints
    chunks: Ints
    first: Ints
    middle: Ints
    last: Ints
    size: Ints

    def __len__(self) -> int:
        return len(self.pipeline)

    def only(self, kept: Bools | Ints) -> "DivisionTable":
        """The divisions that are ``kept``."""
        return _only(self, kept)

    @cached_property
    def is_even(self) -> Bools:
        """Divisions in which all stages have equally many blocks."""
        is_between = (self.stages <= 2) | (self.first == self.middle)
        found: Bools = is_between & ((self.stages == 1) | (self.first == self.last))
        return found

    @cached_property
    def is_nearly_even(self) -> Bools:
        """Divisions that are nearly even, as the module's text defines."""
        share, rest = np.divmod(self.layers, self.stages)
        is_one_more = (self.middle == share + 1) & (self.most_blocks == self.middle)
        is_none = (rest > 0) & (self.layers < (self.stages - 2) * (share + 1))
        is_only = is_none & (self.middle == share) & (self.first == (self.first + self.last) // 2)
        found: Bools = self.is_even | is_one_more | is_only | (self.stages == 2)
        return found

    @cached_property
    def stages(self) -> Ints:
        """The number of stages of every division, on all ranks together."""
        found: Ints = self.pipeline * self.chunks
        return found

    @cached_property
    def most_blocks(self) -> Ints:
        """The blocks of every division's largest stage."""
        found: Ints = np.maximum(np.maximum(self.first, self.last), self.middle)
        return found

    @cached_property
    def division_of_rank(self) -> Ints:
        """The division of every (division, rank)."""
        return np.repeat(np.arange(len(self)), self.pipeline)

    @cached_property
    def first_rank(self) -> Ints:
        """The first of the (division, rank) of every division."""
        return _offsets(self.pipeline)

    @cached_property
    def rank(self) -> Ints:
        """The position in the pipeline of every (division, rank)."""
        found: Ints = np.arange(len(self.division_of_rank)) - self.first_rank[self.division_of_rank]
        return found

    @cached_property
    def _entries(self) -> Ints:
        """How many entries every (division, rank) has."""
        found: Ints = self.chunks[self.division_of_rank]
        return found

    @cached_property
    def first_entry(self) -> Ints:
        """The first entry of every (division, rank)."""
        return _offsets(self._entries)

    @cached_property
    def rank_of_entry(self) -> Ints:
        """The (division, rank) of every entry."""
        return np.repeat(np.arange(len(self._entries)), self._entries)

    @cached_property
    def division_of_entry(self) -> Ints:
        """The division of every entry."""
        found: Ints = self.division_of_rank[self.rank_of_entry]
        return found

    @cached_property
    def rank_of(self) -> Ints:
        """The position in the pipeline of every entry's rank."""
        found: Ints = self.rank[self.rank_of_entry]
        return found

    @cached_property
    def chunk_of(self) -> Ints:
        """The position of every entry among the entries of its rank."""
        found: Ints = np.arange(len(self.rank_of_entry)) - self.first_entry[self.rank_of_entry]
        return found

    @cached_property
    def _stage(self) -> Ints:
        """The stage of every entry."""
        if self.in_v:
            of = self.division_of_entry
            return np.where(self.chunk_of == 0, self.rank_of, self.stages[of] - 1 - self.rank_of)
        found: Ints = self.chunk_of * self.pipeline[self.division_of_entry] + self.rank_of
        return found

    @cached_property
    def is_last(self) -> Bools:
        """Whether every entry's stage is the last."""
        found: Bools = self._stage == self.stages[self.division_of_entry] - 1
        return found

    @cached_property
    def blocks(self) -> Ints:
        """The blocks of every entry's stage."""
        of = self.division_of_entry
        inner = np.where(self.is_last, self.last[of], self.middle[of])
        return np.where(self._stage == 0, self.first[of], inner)

    @cached_property
    def starts(self) -> Ints:
        """The first layer of every entry's stage."""
        of = self.division_of_entry
        after = 1 + self.first[of] + (self._stage - 1) * self.middle[of]
        return np.where(self._stage == 0, 0, after)

    @cached_property
    def stops(self) -> Ints:
        """The layer after the last of every entry's stage."""
        of = self.division_of_entry
        before = 1 + self.first[of] + self._stage * self.middle[of]
        return np.where(self.is_last, self.layers + 2, before)

    def by_rank(self, of_layers: Floats) -> Floats:
        """Sums of a quantity of the layers over every rank's stages."""
        return self.sum_by_rank(self.by_entry(of_layers))

    def by_entry(self, of_layers: Floats) -> Floats:
        """Sums of a quantity of the layers over every stage."""
        prefix = _prefix(of_layers)
        found: Floats = self._at(prefix, self.stops) - self._at(prefix, self.starts)
        return found

    def _at(self, prefix: Floats, place: Ints, entries: Ints | slice = slice(None)) -> Floats:
        """The sums before the layers at the ``place`` of entries."""
        if prefix.ndim == 2:
            place = place + self._size_of_entry[entries] * prefix.shape[1]
        found: Floats = prefix.ravel()[place]
        return found

    @cached_property
    def _size_of_entry(self) -> Ints:
        found: Ints = self.size[self.division_of_entry]
        return found

    def sum_by_rank(self, of_entries: Floats) -> Floats:
        """Sums of the entries of every rank."""
        found: Floats = np.add.reduceat(of_entries, self.first_entry)
        return found

    def sum_before(self, of_entries: Floats) -> Floats:
        """Sums of the first entries of the ranks before every rank."""
        first = of_entries[self.first_entry]
        before: Floats = np.cumsum(first) - first
        found: Floats = before - before[self.first_rank][self.division_of_rank]
        return found

    def before(self, of_layers: Floats) -> Floats:
        """Sums over the layers before every rank's first stage."""
        first = self.first_entry
        return self._at(_prefix(of_layers), self.starts[first], first)

    def after(self, of_layers: Floats) -> Floats:
        """Sums over the layers after every rank's last stage."""
        last = self.first_entry + self._entries - 1
        prefix = _prefix(of_layers)
        every = self._at(prefix, np.full(len(last), self.layers + 2), last)
        found: Floats = every - self._at(prefix, self.stops[last], last)
        return found

    def most(self, of_ranks: Floats) -> Floats:
        """The greatest of every division's ranks."""
        found: Floats = np.maximum.reduceat(of_ranks, self.first_rank)
        return found


def replicas(
    pipeline: Ints,
    chunks: Ints | int,
    left: int,
    batch: int,
    samples: Ints | int,
    schedule: Schedule,
) -> tuple[Ints, Ints, Bools]:
    """Replicas, microbatches of each, and whether the rules on microbatches allow them."""
    form, data = FORMS[schedule], left // pipeline
    m = batch // (samples * data)
    whole = batch % (samples * data) == 0
    by_schedule = np.equal(chunks, 1) | (m % pipeline == 0)
    if form.in_v:
        by_schedule = m >= 2 * pipeline * form.pairs
    ranks = (pipeline > 1) | (schedule == "1f1b")
    return data, m, whole & (m > 0) & (m <= MAX_MICROBATCHES // form.copies) & by_schedule & ranks


def _only(of: _Divided, kept: Bools | Ints) -> _Divided:
    names = (one.name for one in fields(of) if one.name not in ("layers", "in_v"))
    return replace(of, **{name: getattr(of, name)[kept] for name in names})


def _prefix(of_layers: Floats) -> Floats:
    """Sums over the layers before each, and over all."""
    found = np.zeros((*of_layers.shape[:-1], of_layers.shape[-1] + 1))
    np.cumsum(of_layers, axis=-1, out=found[..., 1:])
    return found


def _offsets(sizes: Ints) -> Ints:
    found: Ints = np.cumsum(sizes) - sizes
    return found
