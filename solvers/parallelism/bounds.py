"""Memory of divisions and rates of their exchanges, for all microbatches at once.

The arguments are those of ``Parts.least_bytes``. Arrays are by division, by (division, rank), or by
entry.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stagewright.formulations.parallelism.layout import Placement
from stagewright.formulations.parallelism.schedules import (
    Schedule,
    first_forwards,
    kept_forwards,
)
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.models.shards import Recompute
from stagewright.solvers.parallelism.any_division import SplitBounds
from stagewright.solvers.parallelism.divisions import DivisionTable, replicas
from stagewright.solvers.parallelism.family import LayerParameters
from stagewright.solvers.parallelism.fitting import ROUNDING, state_bytes


@dataclass(frozen=True, eq=False)
class Sized:
    """The divisions that microbatches of the ``sizes`` (samples) and a schedule allow.

    ``data`` and ``microbatches`` are the replicas of every division, and the microbatches of each.
    """

    table: DivisionTable
    sizes: tuple[int, ...]
    data: Ints
    microbatches: Ints
    schedule: Schedule

    def only(self, kept: Bools) -> "Sized":
        """The divisions that are ``kept``."""
        return replace(
            self,
            table=self.table.only(kept),
            data=self.data[kept],
            microbatches=self.microbatches[kept],
        )

    @cached_property
    def samples(self) -> Ints:
        """The samples of every division's microbatch."""
        found: Ints = np.array(self.sizes)[self.table.size]
        return found

    @cached_property
    def flying(self) -> Floats:
        """The samples that every entry keeps; see ``schedules.kept_forwards``."""
        kept: Floats = kept_forwards(self.schedule, *self._sizes).astype(np.float64)
        return kept * self.samples[self.table.division_of_entry]

    @cached_property
    def flying_with_blocks(self) -> Floats:
        """The samples that every rank keeps of stages with blocks."""
        return self.table.sum_by_rank(self.flying * (self.table.blocks > 0))

    @cached_property
    def first_forwards(self) -> Floats:
        """Per entry, the forwards before the first backward; see ``schedules``."""
        return first_forwards(self.schedule, *self._sizes).astype(np.float64)

    @cached_property
    def of_rank(self) -> Ints:
        """The microbatches of every rank."""
        found: Ints = self.microbatches[self.table.division_of_rank]
        return found

    @property
    def _sizes(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        table, of = self.table, self.table.division_of_entry
        sizes = (each[of] for each in (table.pipeline, table.chunks, self.microbatches))
        p, v, m = sizes
        return p, v, m, table.rank_of, table.chunk_of


def sized(
    table: DivisionTable, left: int, batch: int, sizes: tuple[int, ...], schedule: Schedule
) -> Sized | None:
    """The divisions of ``left`` ranks that the rules on microbatches allow; None if there are none.

    A replica has a whole number of microbatches.
    """
    samples = np.array(sizes)[:, None]
    data, m, kept = replicas(table.pipeline, table.chunks, left, batch, samples, schedule)
    size, place = np.nonzero(kept)
    if not len(place):
        return None
    of = replace(table.only(place), size=size)
    return Sized(of, sizes, data[place], m[kept], schedule)


@dataclass(frozen=True, slots=True)
class Keeping:
    """ZeRO's stage, whether the optimizer's state is offloaded, and which ranks are nearer."""

    zero: int
    offload: bool
    placement: Placement


class Bounds:
    """Bounds for layers that are divided in one way, and the divisions of microbatches.

    They are below the closed bounds ``any_division``, or tighter.
    """

    def __init__(self, any_division: SplitBounds, sized: Sized) -> None:
        self.any_division, self.family = any_division, any_division.family
        self.sized, self.table, self.problem = sized, sized.table, self.family.problem
        self.of = self.table.division_of_rank
        self._rates: dict[Placement, Floats] = {}
        self._hops: dict[Placement | None, Floats] = {}
        self._kept: dict[Recompute, Floats] = {}

    @cached_property
    def allowed(self) -> Bools:
        """Divisions in which the experts can be divided evenly."""
        return self.family.can_divide_experts(self.sized.data, self.sized.schedule)

    def only(self, kept: Bools) -> "Bounds":
        """The bounds of the divisions that are ``kept``."""
        return Bounds(self.any_division, self.sized.only(kept))

    @cached_property
    def _closed(self) -> Floats:
        of = self.table
        return self.any_division.by_division(self.sized.samples, of.pipeline, of.chunks)

    def closed_of(self, keeping: Keeping) -> Floats:
        """Closed bounds of every division, with ZeRO in a placement."""
        keepings = self.any_division.of.keepings
        inside = int(keeping.placement == "pipeline-inside")
        found: Floats = self._closed[inside, keepings.index((keeping.zero, keeping.offload))]
        return found

    # Memory.

    @cached_property
    def held(self) -> LayerParameters:
        """Every rank's parameters."""
        return self.family.parameters.each(self.table.by_rank)

    @cached_property
    def trained(self) -> LayerParameters:
        """Every rank's parameters that are trained."""
        if self.family.trained is self.family.parameters:
            return self.held
        return self.family.trained.each(self.table.by_rank)

    @cached_property
    def _trained_part(self) -> Floats:
        return self.family.divided(self.trained, self.sized.data[self.of])

    def room(self, memory: float, keeping: Keeping) -> Floats:
        """Bytes that every rank has for activations."""
        trained = every = self._trained_part, self.trained.all
        if self.held is not self.trained:
            every = self.family.divided(self.held, self.sized.data[self.of]), self.held.all
        ranks = self.table.pipeline[self.of]
        states = state_bytes(self.problem, keeping.zero, keeping.offload, ranks, trained, every)
        found: Floats = memory - self.problem.reserve_bytes - states - self._gathered(keeping)
        return found

    def _gathered(self, keeping: Keeping) -> Floats:
        """Bytes that every rank gathers at the least; see ``StageCosts.memory``."""
        family, problem = self.family, self.problem
        memory, sizes, zero = problem.memory, problem.precision, keeping.zero
        found = np.zeros(len(self.of))
        if zero:
            found += 2 * np.minimum(memory.bucket_parameters, self.trained.all) * sizes.weight_bytes
        each = memory.layer_gradients * sizes.weight_bytes
        each += (zero >= 2) * sizes.gradient_bytes + 2 * (zero == 3) * sizes.weight_bytes
        if each:
            found += each * self.has_blocks * float(family.trained.all[1:-1].min())
        if family.split.sequence_parallel:
            samples = self.sized.samples[self.of]
            found += family.shares.widest * samples * sizes.activation_bytes
        found *= 1 + memory.slack
        return found

    @cached_property
    def has_blocks(self) -> Bools:
        """Whether every rank has a stage with blocks."""
        return self.sized.flying_with_blocks > 0

    def kept(self, recompute: Recompute) -> Floats:
        """Bytes of activations that every rank keeps at the least, with the logits' gradient."""
        if recompute not in self._kept:
            saved = self.table.by_entry(self.family.saved(recompute))
            kept = self.table.sum_by_rank(self.sized.flying * saved)
            self._kept[recompute] = kept + self._logits
        return self._kept[recompute]

    @cached_property
    def _logits(self) -> Floats:
        """Bytes of the logits' gradient on every rank."""
        head = self.problem.processor.gradient_of_loss(self.family.shares.head)
        has_last = self.table.sum_by_rank(self.table.is_last.astype(np.float64))
        found: Floats = self.sized.samples[self.of] * head * has_last
        return found

    def fits(self, short: Floats) -> Bools:
        """Which divisions may fit, if every rank is ``short`` of so many bytes."""
        found: Bools = self.table.most(short) <= 0
        return found

    def fewest(self, short: Floats, least: int) -> Ints:
        """A lower bound on the blocks of every stage that are recomputed, ``least`` or more.

        A block frees at most ``LayerFamily.freed`` of every sample of its stage. Where even all
        blocks are too few the number is larger than that of any stage.
        """
        table, each = self.table, self.family.freed
        # A backward holds again what its block freed, or the logits' gradient if that is more.
        samples = self.sized.samples[self.of]
        held = np.maximum(samples * self.family.least_freed - self._logits, 0.0)
        again = (least > 0) | ~self.fits(short)
        short = short + held * self.has_blocks * again[self.of]
        found, rounding = np.full(len(table), least), ROUNDING * np.abs(short)
        while True:
            # A stage frees no more when all of its blocks are recomputed: at most as the others do.
            now = found[table.division_of_entry]
            freed = each * table.sum_by_rank(self.sized.flying * np.minimum(table.blocks, now))
            rate = each * table.sum_by_rank(np.where(table.blocks > now, self.sized.flying, 0.0))
            lacks = np.maximum(short - freed - rounding, 0.0)
            most = table.most_blocks[self.of] + 1.0
            needed = np.divide(lacks, rate, out=np.where(lacks > 0, most, 0.0), where=rate > 0)
            more = found + np.ceil(table.most(needed)).astype(np.int64)
            more = np.minimum(more, table.most_blocks + 1)
            if (more == found).all():
                return found
            found = more

    # Time.

    def rates(self, placement: Placement) -> Floats:
        """(5, ranks) the rates of gathers, and seconds for a tied table: ``LayerFamily.rates``."""
        if placement not in self._rates:
            rates = self.family.rates(self.table.pipeline, self.sized.schedule, placement)
            found = rates[2:, self.of]
            table, rank = self.table, self.table.rank
            is_inner = (rank > 0) & (rank < table.pipeline[self.of] - 1)
            found[4, is_inner | table.in_v] = 0.0
            self._rates[placement] = found
        return self._rates[placement]

    def hops(self, placement: Placement | None) -> Floats:
        """(2, ranks) seconds of hops: there and back, and up to the first backward."""
        if placement not in self._hops:
            table, of = self.table, self.of
            sizes = table.pipeline, self.sized.samples, self.sized.schedule
            each = self.family.hop_seconds(*sizes, placement)[of]
            p, rank = table.pipeline[of], table.rank
            back = rank if table.in_v else p - 1 - rank
            there = 2 * p - 2 if table.in_v else table.stages[of] - 1
            self._hops[placement] = each * np.array((2 * rank, there + back))
        return self._hops[placement]

    def update(self, keeping: Keeping) -> Floats:
        """Seconds of every rank's update; none where the optimizer is offloaded, or free."""
        if keeping.offload or not self.problem.charges("optimizer step"):
            return np.zeros(len(self.of))
        number = self._trained_part if keeping.zero else self.trained.all
        return self.problem.processor.update_seconds(number)
