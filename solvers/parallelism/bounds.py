"""Lower bounds of all divisions of a pipeline at once, for layers that are divided in one way.

The arguments are those of ``Parts.least_seconds`` and ``Parts.least_bytes``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stagewright.formulations.parallelism.exchanges import gather_seconds
from stagewright.formulations.parallelism.layer_times import LayerTime, share_time
from stagewright.formulations.parallelism.layout import Layout, Schedule
from stagewright.formulations.parallelism.parts import shares
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.documents.units import MAX_MICROBATCHES
from stagewright.graphs.machines.groups import Group, Links, links
from stagewright.graphs.models.shards import Recompute, Share, Split
from stagewright.solvers.parallelism.divisions import Table


@dataclass(frozen=True, slots=True)
class Work:
    """(L + 2,) seconds of every layer on a microbatch; of ``total``, ``weight`` is put off."""

    total: Floats
    forward: Floats
    weight: Floats


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is kept where: ZeRO's stage, and whether the optimizer's state is in host memory."""

    zero: int
    offload: bool


class Bounds:
    """Bounds for ``split`` layers; arrays are by division, by (division, rank), or by entry."""

    def __init__(self, problem: TrainingProblem, split: Split, table: Table) -> None:
        self.problem, self.split, self.table = problem, split, table
        self.shares = shares(problem, split)
        left = problem.fabric.devices // (split.tensor * split.context)
        self.data: Ints = left // table.pipeline
        self.of = table.division_of_rank

    def by_layer(self, quantity: Callable[[Share], float]) -> Floats:
        """(L + 2,) a quantity of every layer."""
        of = self.shares
        every = (*of.kinds, of.embedding, of.head)
        found: Floats = np.array([quantity(one) for one in every])[self._places]
        return found

    @cached_property
    def _places(self) -> Ints:
        """Of every layer, the place of its share among the kinds, the embedding and the head."""
        kinds = len(self.shares.kinds)
        return np.array([kinds, *self.shares.blocks, kinds + 1])

    def times(
        self, samples: int, recompute: Recompute, schedule: Schedule
    ) -> Callable[[Share], LayerTime]:
        """The times of a layer."""
        off = schedule == "zero-bubble"
        return lambda share: share_time(self.problem, share, self.split, samples, recompute, off)

    def work(self, samples: int, recompute: Recompute, schedule: Schedule = "1f1b") -> Work:
        """The times of all layers; with 1F1B they are shortest."""
        times = self.times(samples, recompute, schedule)
        return Work(
            total=self.by_layer(lambda share: times(share).forward + times(share).backward),
            forward=self.by_layer(lambda share: times(share).forward),
            weight=self.by_layer(lambda share: times(share).weight),
        )

    def microbatches(self, samples: int) -> Ints:
        """The microbatches of every division."""
        found: Ints = self.problem.batch // (samples * self.data)
        return found

    def allowed(self, samples: int, schedule: Schedule) -> Bools:
        """The rules that do not follow from the choice of the values."""
        table, split, m = self.table, self.split, self.microbatches(samples)
        whole = self.problem.batch % (samples * self.data) == 0
        in_groups = (table.chunks == 1) | (m % table.pipeline == 0)
        shared = split.tensor * split.context * self.data % split.expert == 0
        bubbles = (table.pipeline > 1) | (schedule == "1f1b")
        few = (m > 0) & (m <= MAX_MICROBATCHES)
        found: Bools = whole & few & in_groups & shared & bubbles
        return found

    # Memory.

    @cached_property
    def _shared(self) -> Floats:
        return self.table.by_rank(self.by_layer(lambda one: one.parameters))

    @cached_property
    def _expert(self) -> Floats:
        return self.table.by_rank(self.by_layer(lambda one: one.expert_parameters))

    @cached_property
    def _part(self) -> Floats:
        """A rank's part of its parameters where they are divided among those with equal ones."""
        ranks = self.split.context * self.data
        experts = np.maximum(1, self.split.tensor * ranks // self.split.expert)
        return self._shared / ranks[self.of] + self._expert / experts[self.of]

    @cached_property
    def alone(self) -> Bools:
        """Where no rank has the same parameters as another."""
        ranks = self.split.context * self.data
        found: Bools = ranks == 1
        if self.problem.architecture.experts is not None:
            found = found & (self.split.tensor * ranks <= self.split.expert)
        return found

    def room(self, memory: float, keeping: Keeping) -> Floats:
        """What every rank has for activations."""
        precision, whole = self.problem.precision, self._shared + self._expert
        kept = 0 if keeping.offload else precision.optimizer_bytes
        sizes = {3: precision.weight_bytes, 2: precision.gradient_bytes, 1: kept}
        room = np.full(len(whole), memory - self.problem.reserve_bytes)
        for stage, size in sizes.items():
            room -= size * (self._part if keeping.zero >= stage else whole)
        return room

    def _saved(self, recompute: Recompute) -> Floats:
        """Bytes that every entry keeps of a sample."""
        size = self.problem.precision.activation_bytes
        return self.table.by_entry(self.by_layer(lambda one: one.saved_bytes(size, recompute)))

    def flying(self, samples: int, schedule: Schedule) -> Floats:
        """The samples that every entry keeps."""
        m = self.microbatches(samples)
        return samples * self.table.in_flight(m, schedule == "zero-bubble")

    def fits(self, flying: Floats, room: Floats, recompute: Recompute) -> Bools:
        """Which divisions may fit."""
        kept = self.table.sum_by_rank(flying * self._saved(recompute))
        found: Bools = self.table.most(kept - room) <= 0
        return found

    def fewest(self, flying: Floats, room: Floats, least: int) -> Ints:
        """A lower bound on the blocks of every stage that are recomputed, ``least`` or more."""
        size, table = self.problem.precision.activation_bytes, self.table
        each = max(
            one.saved_bytes(size, "none") - one.saved_bytes(size, "full")
            for one in self.shares.kinds
        )
        short = table.sum_by_rank(flying * self._saved("none")) - room
        low, high = np.full(len(table.every), least), table.most_blocks + 1
        while (low < high).any():
            middle = (low + high) // 2
            blocks = np.minimum(table.blocks, middle[table.division_of_entry])
            enough = table.most(short - each * table.sum_by_rank(flying * blocks)) <= 0
            low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
            high = np.maximum(low, high)
        return low

    # Time.

    def hops(self, samples: int) -> Floats:
        """From stage to stage of every division, for the nearer of the placements."""
        width = self.shares.kinds[0].width / self.split.tensor
        start, per_byte = self._hop_rates
        found: Floats = start + per_byte * (
            samples * width * self.problem.precision.activation_bytes
        )
        return found

    @cached_property
    def _hop_rates(self) -> Floats:
        """(2, divisions) seconds of a hop at its start, and per byte, at the least."""
        found = {}
        for pair in self._pairs:
            each = []
            for one in self._placed(*pair):
                ways = links(self.problem.fabric, one.pipeline_group).ways
                # Of several ways the slowest decides: each is a bound, that of least bandwidth too.
                rates = ((1 / way.pair_bytes_per_second, way.latency_seconds) for way in ways)
                per_byte, start = max(rates, default=(0.0, 0.0))
                each.append((start, per_byte))
            found[pair] = np.min(each, axis=0)
        columns: Floats = np.array([found[pair] for pair in self._pair_of]).T
        return columns

    @cached_property
    def _pair_of(self) -> list[tuple[int, int]]:
        """The pipeline and data degree of every division."""
        return list(zip(self.table.pipeline.tolist(), self.data.tolist(), strict=True))

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        """The different pipeline and data degrees."""
        return sorted(set(self._pair_of))

    def filled(self, samples: int, schedule: Schedule, work: Work) -> tuple[Floats, Floats]:
        """For every rank: its work, with the way to it and back; the same from its first backward.

        The first lasts until the first rank's last (input) gradient, the second until the rank's
        own last computation.
        """
        table, split = self.table, schedule == "zero-bubble"
        m = self.microbatches(samples)
        returned = work.total - work.weight
        hops = self.hops(samples)[self.of] * table.rank
        there = table.before(returned) + 2 * hops + m[self.of] * table.by_rank(returned)
        done = table.sum_by_rank(table.first_forwards(m, split) * table.by_entry(work.forward))
        first = float(work.forward.sum()) + table.after(returned - work.forward)
        return there, first - done + m[self.of] * table.by_rank(work.total)

    def again(self, samples: int, fewest: Ints, schedule: Schedule) -> Floats:
        """Seconds of every entry to recompute the fewest blocks for a microbatch."""
        full, none = (self.times(samples, kind, schedule) for kind in ("full", "none"))
        table = self.table
        once = min(full(kind).backward - none(kind).backward for kind in self.shares.kinds)
        blocks = np.minimum(table.blocks, fewest[table.division_of_entry])
        repeated: Floats = once * blocks
        return repeated

    def waiting(self, keeping: Keeping, work: Work, again: Floats) -> Floats:
        """Seconds of every entry that ZeRO's exchanges add to a microbatch."""
        table, precision = self.table, self.problem.precision
        if keeping.zero < 2:
            return np.zeros(len(table.starts))
        shared, expert = (
            table.by_entry(self.by_layer(of))
            for of in (lambda one: one.parameters, lambda one: one.expert_parameters)
        )
        start, per_byte, expert_start, expert_per_byte = self._rates[:, table.rank_of_entry]
        start = start + np.where(expert > 0, expert_start, 0.0)
        each = shared * per_byte + expert * expert_per_byte
        weights: Floats = (start + each * precision.weight_bytes) * (keeping.zero == 3)
        gradients: Floats = start + each * precision.gradient_bytes
        if not self.problem.overlap:
            return 2 * weights + gradients
        forward = table.by_entry(work.forward)
        backward = table.by_entry(work.total - work.weight) - forward + again
        seen: Floats = np.maximum(weights - forward, 0.0)
        return seen + np.maximum(weights + gradients - backward, 0.0)

    def after(self, keeping: Keeping, work: Work, longest: Work) -> Floats:
        """Every rank's exchange of gradients and weights, beside the ``longest`` possible work."""
        precision, table = self.problem.precision, self.table
        layers = table.by_rank(np.ones(len(longest.total)))
        gradients, weights = (
            self._gather(size) for size in (precision.gradient_bytes, precision.weight_bytes)
        )
        alone = np.zeros(len(self.of))
        if keeping.zero >= 2 and self.problem.overlap:
            forward = table.by_rank(work.forward)
            backward = table.by_rank(work.total) - forward
            alone += np.minimum(gradients / layers, backward)
            alone += np.minimum(weights / layers, forward) * (keeping.zero == 3)
        if keeping.zero == 3:
            return alone
        gradients = {0: 2, 1: 1, 2: 0}[keeping.zero] * gradients
        weights = min(keeping.zero, 1) * weights
        if not self.problem.overlap:
            return gradients + weights
        last = table.by_rank(longest.total - longest.forward)
        first = table.by_rank(longest.forward)
        seen: Floats = np.maximum(gradients - last, gradients / layers)
        return alone + seen + np.maximum(weights - first, weights / layers)

    def _gather(self, bytes_each: int) -> Floats:
        """A gathering of every rank's parameters, for the placement where it is quicker."""
        start, per_byte, expert_start, expert_per_byte = self._rates
        start = start + np.where(self._expert > 0, expert_start, 0.0)
        bytes_seconds = self._shared * per_byte + self._expert * expert_per_byte
        found: Floats = start + bytes_seconds * bytes_each
        return found

    @cached_property
    def _rates(self) -> Floats:
        """(4, ranks) start and rate of gathering shared and experts' parameters, at the least."""
        found = {}
        for pair in self._pairs:
            each = []
            for one in self._placed(*pair):
                groups = (one.data_group, one.expert_group)
                each.append([x for group in groups for x in self._rate(group)])
            found[pair] = np.min(each, axis=0)
        columns: Floats = np.array([found[pair] for pair in self._pair_of])[self.of].T
        return columns

    def _rate(self, group: Group) -> tuple[float, float]:
        """Seconds of a gathering at its start, and per byte, over one of its ways."""
        of, size = links(self.problem.fabric, group), 1e9
        if len(of.ways) > 1:
            slowest = max(of.ways, key=lambda way: gather_seconds(Links(of.size, (way,)), size))
            of = Links(of.size, (slowest,))
        one, two = gather_seconds(of, size), gather_seconds(of, 2 * size)
        return max(0.0, 2 * one - two), (two - one) / size

    def _placed(self, pipeline: int, data: int) -> list[Layout]:
        """The placements that are possible."""
        split = self.split
        shared = split.tensor * split.context * data
        one = Layout(
            pipeline=pipeline,
            tensor=split.tensor,
            context=split.context,
            data=data,
            expert=split.expert if shared % split.expert == 0 else 1,
        )
        if split.tensor * split.context % one.expert:
            return [one]
        return [one, replace(one, placement="pipeline-inside")]

    def update(self, keeping: Keeping) -> Floats:
        """Seconds of every rank's update; none where the optimizer is offloaded."""
        if keeping.offload:
            return np.zeros(len(self.of))
        precision = self.problem.precision
        moved = precision.gradient_bytes + 2 * precision.optimizer_bytes + precision.weight_bytes
        rate = self.problem.card.memory_bytes_per_second * self.problem.reached.memory
        number = self._part if keeping.zero else self._shared + self._expert
        return number * moved / rate
