"""Lower bounds of all divisions of a pipeline at once, for layers that are divided in one way.

The arguments are those of ``Parts.least_seconds`` and ``Parts.least_bytes``. Arrays are by
division, by (division, rank), or by entry.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.models.shards import Recompute
from stagewright.solvers.parallelism.divisions import Sized
from stagewright.solvers.parallelism.family import Family

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where states are kept: ZeRO's stage, and whether the optimizer's state is offloaded."""

    zero: int
    offload: bool


class Bounds:
    """Bounds for the layers of a family and the divisions of a microbatch."""

    def __init__(self, family: Family, sized: Sized) -> None:
        self.family, self.sized, self.table = family, sized, sized.table
        self.problem = family.problem
        self.of = self.table.division_of_rank

    @cached_property
    def allowed(self) -> Bools:
        """Divisions in which the experts can be divided evenly."""
        found: Bools = self.family.replica * self.sized.data % self.family.split.expert == 0
        return found

    # Memory.

    @cached_property
    def shared(self) -> Floats:
        """Every rank's parameters, but for those of experts."""
        return self.table.by_rank(self.family.parameters)

    @cached_property
    def expert(self) -> Floats:
        """Parameters of every rank's experts."""
        return self.table.by_rank(self.family.expert_parameters)

    @cached_property
    def _part(self) -> Floats:
        """A rank's part of its parameters if ranks with equal parameters divide them."""
        split = self.family.split
        ranks = split.context * self.sized.data
        experts = np.maximum(1, split.tensor * ranks // split.expert)
        return self.shared / ranks[self.of] + self.expert / experts[self.of]

    @cached_property
    def alone(self) -> Bools:
        """Divisions in which no two ranks have the same parameters."""
        split = self.family.split
        ranks = split.context * self.sized.data
        found: Bools = ranks == 1
        if self.problem.architecture.experts is not None:
            found = found & (split.tensor * ranks <= split.expert)
        return found

    def room(self, memory: float, keeping: Keeping) -> Floats:
        """Bytes that every rank has for activations."""
        precision, whole = self.problem.precision, self.shared + self.expert
        kept = 0 if keeping.offload else precision.optimizer_bytes
        sizes = {3: precision.weight_bytes, 2: precision.gradient_bytes, 1: kept}
        room = np.full(len(whole), memory - self.problem.reserve_bytes)
        for stage, size in sizes.items():
            room -= size * (self._part if keeping.zero >= stage else whole)
        return room

    def kept(self, recompute: Recompute) -> Floats:
        """Bytes of activations that every rank keeps at the least."""
        saved = self.table.by_entry(self.family.saved(recompute))
        return self.table.sum_by_rank(self.sized.flying * saved)

    def fits(self, short: Floats) -> Bools:
        """Which divisions may fit, if every rank is ``short`` of so many bytes."""
        found: Bools = self.table.most(short) <= 0
        return found

    def fewest(self, short: Floats, least: int) -> Ints:
        """A lower bound on the blocks of every stage that are recomputed, ``least`` or more.

        A block frees at most ``Family.freed`` of every sample of its stage. Where even all blocks
        are too few the number is larger than that of any stage.
        """
        table, each = self.table, self.family.freed
        needed = short * (1 - ROUNDING) / (each * np.maximum(self.sized.flying_with_blocks, 1))
        found = np.maximum(least, np.ceil(table.most(needed))).astype(np.int64)
        enough = self.fits(short - each * self.sized.flying_blocks)
        return np.where(enough, np.minimum(found, table.most_blocks), table.most_blocks + 1)

    # Time.

    @cached_property
    def rates(self) -> Floats:
        """(4, ranks) start and rate of gathering shared and experts' parameters, at the least."""
        found: Floats = self.family.rates(self.table.pipeline)[2:, self.of]
        return found

    @cached_property
    def hops(self) -> Floats:
        """Seconds from the first rank to every other, for the nearer of the placements."""
        found: Floats = self.hop_seconds(self.table.pipeline)[self.of] * self.table.rank
        return found

    def hop_seconds(self, pipelines: Ints) -> Floats:
        """Seconds from a rank to the next, for pipelines of so many ranks."""
        start, per_byte = self.family.rates(pipelines)[:2]
        width = self.family.shares.kinds[0].width / self.family.split.tensor
        moved = self.sized.samples * width * self.problem.precision.activation_bytes
        found: Floats = start + per_byte * moved
        return found

    def update(self, keeping: Keeping) -> Floats:
        """Seconds of every rank's update; none where the optimizer is offloaded."""
        if keeping.offload:
            return np.zeros(len(self.of))
        precision = self.problem.precision
        moved = precision.gradient_bytes + 2 * precision.optimizer_bytes + precision.weight_bytes
        rate = self.problem.card.memory_bytes_per_second * self.problem.reached.memory
        number = self._part if keeping.zero else self.shared + self.expert
        return number * moved / rate
