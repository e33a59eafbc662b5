"""Closed lower bounds on pipelines of any division of the blocks, with any recomputation.

A plain pipeline of p stages and m microbatches whose stages take c_0, ..., c_(p-1) for one of them,
of which a part a at least is spent before the next stage can begin, or after it has come back,
lasts at least a (c_0 + ... + c_(s-1)) + m c_s, for every s. The mean of these in which all stages
count alike is

    (c_0 + ... + c_(p-1)) a / (1 - (1 - a/m)^p),

whatever the division: the sum is the model's. The part is 1 (forward and backward), where backwards
are split in two without their weights' part; or it is the forward's, with all of the backward. With
whole forwards and backwards the mean also has the hops to a stage and back, and the first rank's
sum of a tied table's gradients. A rank of an interleaved pipeline computes nothing before the first
stages of the ranks before it, of at least a block each but for the first: the mean of the ranks'
work and of these is its bound. Both last at least as long as their slowest rank computes, of whole
blocks, as one rank has the embedding and one the head.

To the sum is added what ZeRO's exchanges show beside all work, and the recomputation without which
the activations of all blocks do not fit: rank r keeps those of at least min(m, p - r) microbatches,
beside its states; a block more than fits on a rank needs as many bytes as it has. To the time is
added the mean rank's update, and the exchange of a layer's gradients.

Of pipelines in a V the bound is the mean rank's work.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf

import numpy as np

from stagewright.formulations.parallelism.layout import Layout, Placement
from stagewright.formulations.parallelism.schedules import FORMS, Schedule
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.prices.collectives import link_seconds
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.models.shards import Recompute
from stagewright.solvers.parallelism.family import LayerFamily, LayerParameters
from stagewright.solvers.parallelism.fitting import ROUNDING, FittingPipelines, SearchedSpace
from stagewright.solvers.parallelism.space import Space


@dataclass(frozen=True, slots=True)
class Plain:
    """Plain pipelines that differ in their division and recomputation alone.

    None of them that fits takes less than ``bound``.
    """

    bound: float
    layout: Layout


class AnyDivision(SearchedSpace):
    """Closed bounds on all pipelines of a space, for devices of so many bytes."""

    def __init__(self, problem: TrainingProblem, space: Space, memory: float) -> None:
        super().__init__(problem, space, memory)
        every = [LayerFamily(problem, split) for split in space.families(problem)]
        # With the work of all samples, as little as it can be, spread evenly over all ranks.
        work = [one.least_work(problem.batch, "none", space.schedules) / one.left for one in every]
        self.families = sorted(zip(work, every, strict=True), key=lambda one: one[0])
        self._bounds: dict[tuple[LayerFamily, Schedule], SplitBounds] = {}

    def of(self, family: LayerFamily, schedule: Schedule) -> "SplitBounds":
        """The bounds for layers that are divided in one way, and a schedule."""
        key = family, schedule
        if key not in self._bounds:
            self._bounds[key] = SplitBounds(self, family, schedule)
        return self._bounds[key]

    def pipelines(self, family: LayerFamily, schedule: Schedule) -> float:
        """A bound on all pipelines with a schedule by that for 1F1B, which is quicker to find.

        Nothing of a schedule in a loop takes less time or memory than with 1F1B but for bubbles.
        """
        of = self.of(family, schedule if FORMS[schedule].in_v else "1f1b")
        if not len(of.ranks):
            return inf
        if of.schedule == schedule:
            return -inf
        return float(of.without_bubbles[..., of.ranks > 1].min(initial=inf))

    def _below(self, below: Callable[[], float]) -> Iterator["SplitBounds"]:
        """The bounds for all divided layers whose work alone takes less."""
        for evenly, family in self.families:
            if evenly >= below():
                return
            for one in self.space.schedules:
                if self.pipelines(family, one) < below():
                    yield self.of(family, one)

    def interleaved(self) -> float:
        """A bound on pipelines with several stages on a rank; infinite if none is possible."""
        least = [inf]
        for bounds in self._below(lambda: min(least)):
            least.append(float(bounds.several.min(initial=inf)))
        return min(least)

    def plain(self, below: Callable[[], float]) -> Iterator[Plain]:
        """The plain pipelines by ascending bound, while bounds are below the best known time."""
        found = [
            (float(bounds.plain[place]), bounds, place)
            for bounds in self._below(below)
            for place in zip(*np.nonzero(bounds.plain < below()), strict=True)
            if bounds.ranks[place[3]] > 1
        ]
        for bound, bounds, place in sorted(found, key=lambda one: one[0]):
            if bound >= below():
                return
            yield Plain(bound, bounds.layout(place))


any_division = lru_cache(maxsize=4)(AnyDivision)
"""The bounds of a problem, for its search and what follows it."""

_Place = tuple[int, ...]  # placement, ZeRO with offload, size of a microbatch, and ranks
_PLACEMENTS: tuple[Placement, Placement] = ("data-inside", "pipeline-inside")


class SplitBounds(FittingPipelines):
    """Bounds for layers that are divided in one way, and one schedule.

    Arrays have some of the axes placement (2) and those of ``FittingPipelines``.
    """

    of: AnyDivision

    @cached_property
    def plain(self) -> Floats:
        """(2, K, S, P) bounds on pipelines with one stage on a rank; infinite for others."""
        if self.form.in_v:
            return np.full((2, len(self.of.keepings), *self.m.shape), inf)
        there, _ = self._work
        hop, tied = self._hops
        part = self._part
        filled = there * _filling(self.m, self.ranks, 1.0) + tied
        filled += 2 * hop * _mean_stage(self.m, self.ranks, 1.0)
        returned = self._sums[:, :1] + self._again - self._sums[:, 2:]
        least = (1 - part / self.m) ** (self.ranks - 1) * (there - returned)
        whole = (self._sums[:, :1] + self._again + least) * _filling(self.m, self.ranks, part)
        whole += hop * _mean_stage(self.m, self.ranks, part)
        return self._ended(np.maximum(filled, whole), self.allowed)

    @cached_property
    def several(self) -> Floats:
        """(2, K, S, P) bounds on pipelines with several stages on a rank."""
        if self.form.in_v:
            busy = self.m * self._sums[:, :1] / self.ranks * (1 - ROUNDING)
            return np.where(self.allowed & self._differs, busy, inf)
        if self.form.chunks or self.of.space.chunks == 1:
            return np.full((2, len(self.of.keepings), *self.m.shape), inf)
        there, own = self._work
        hop, tied = self._hops
        p, (first, block) = self.ranks, self._ends
        before = 1 - 1 / p
        between = before * (p - 2) / 2
        ahead = first[1] * before + block[1] * between + (p - 1) / 2 * hop
        back = (first[0] - first[2]) * before + (block[0] - block[2]) * between + (p - 1) * hop
        found = np.maximum(self.m * there / p + back + tied, self.m * own / p + ahead)
        return self._ended(found, self.allowed & (self.m % p == 0) & (p > 1))

    @cached_property
    def without_bubbles(self) -> Floats:
        """(2, K, S, P) bounds on all pipelines by their work alone."""
        return self._ended(self.m * self._work[1] / self.ranks, self.allowed)

    def _ended(self, pipeline: Floats, allowed: Bools) -> Floats:
        """The bounds with the slowest rank, the exchange of gradients and the update."""
        whole = np.maximum(pipeline, self.m * self._slowest)
        whole = whole + self._reductions + self._updates
        return np.where(allowed & self.fitting[0] & self._differs, whole * (1 - ROUNDING), inf)

    @cached_property
    def _differs(self) -> Bools:
        """(2, K, 1, P) placements that differ and ZeRO stages with something that they divide."""
        is_least = self.zeros == min(self.of.space.zero)
        divides = is_least | ~self.family.are_alone(self.data * self.form.copies)
        return np.asarray(self._placed[:, None, None] & divides)

    def layout(self, place: _Place) -> Layout:
        """The layout of a bound on plain pipelines, without a division."""
        split, (zero, offload) = self.family.split, self.of.keepings[place[1]]
        return Layout(
            pipeline=int(self.ranks[place[3]]),
            tensor=split.tensor,
            context=split.context,
            data=int(self.data[place[3]]),
            expert=split.expert,
            microbatch=self.of.sizes[place[2]],
            schedule=self.schedule,
            sequence_parallel=split.sequence_parallel,
            zero=zero,
            offload_optimizer=offload,
            placement=_PLACEMENTS[place[0]],
        )

    # Work.

    @cached_property
    def _by_size(self) -> list[tuple[Floats, Floats, Floats]]:
        every = (self.family.work(one, "none", self.schedule) for one in self._sizes)
        return [(one.total, one.forward, one.weight) for one in every]

    @cached_property
    def _sizes(self) -> list[int]:
        """The samples of microbatches; of those that are not possible the times are of another."""
        sizes = np.array(self.of.sizes)
        some = (self.allowed & (self.fitting[0] | self.form.in_v)).any(axis=(0, 2))
        found: list[int] = np.where(some, sizes, sizes[some.argmax()]).tolist()
        return found

    @cached_property
    def _sums(self) -> Floats:
        """(S, 3) seconds of all layers on a microbatch: all, of forwards, and what is put off."""
        return np.array([[one.sum() for one in every] for every in self._by_size])

    @cached_property
    def _ends(self) -> Floats:
        """(2, 3, S, 1) the same of the first layer, and of the quickest block."""
        first = [[one[0] for one in every] for every in self._by_size]
        block = [[one[1:-1].min() for one in every] for every in self._by_size]
        return np.array((first, block)).transpose(0, 2, 1)[..., None]

    @cached_property
    def _part(self) -> Floats:
        """(S, 1) the forward's part of the work at the least, whatever is recomputed."""
        kind: Recompute = "full" if self.of.repeats else "none"
        works = [self.family.work(one, kind, self.schedule) for one in self._sizes]
        some = [(one.forward[one.total > 0], one.total[one.total > 0]) for one in works]
        return np.array([[(forward / total).min(initial=1.0)] for forward, total in some])

    @cached_property
    def _slowest(self) -> Floats:
        """(S, P) the least time of the slowest rank, if all blocks take as long as the quickest."""
        block = self._ends[1, 0]
        first, last = (np.array([[every[0][end]] for every in self._by_size]) for end in (0, -1))
        rows = block[..., None] * np.arange(self.blocks + 1)
        every = np.concatenate([rows, rows + first[..., None], rows + last[..., None]], axis=-1)
        own = (first[..., None], last[..., None], 0.0)
        has = [np.floor((every - one) / block[..., None] + ROUNDING) for one in own]
        can = (has[0] >= 0) & (has[1] >= 0)
        can = can & (has[0] + has[1] + (self.ranks[:, None] - 2) * has[2] >= self.blocks)
        found = np.where(can, every, inf).min(axis=-1)
        return np.where(self.ranks == 1, self._sums[:, :1], found)

    @cached_property
    def _work(self) -> tuple[Floats, Floats]:
        """(2, K, S, P) work without what is put off, and all, with what ZeRO's exchanges show."""
        (_, parameters), (_, trained) = self._exchanged
        sizes, zero = self.problem.precision, self.zeros
        moved = parameters[:, None, None] * sizes.weight_bytes * (zero == 3)
        forward, weight = self._sums[:, 1:2], self._sums[:, 2:]
        backward = self._sums[:, :1] + self._again - forward - weight
        found = self._beside(forward, moved)
        moved = moved + trained[:, None, None] * sizes.gradient_bytes * (zero >= 2)
        found = found + self._beside(backward, moved)
        return found, found + weight

    def _beside(self, work: Floats, moved: Floats) -> Floats:
        """Seconds of all stages' work and exchanges, at the least; see ``StageCosts.beside``.

        With a contention of at most 1, a sum of stages takes no less than their sums.
        """
        if not self.problem.overlap:
            return work + moved
        contention = min(self.problem.reached.contention, 1.0)
        return np.asarray(np.maximum(work, moved) + contention * np.minimum(work, moved))

    # Exchanges and the update.

    @cached_property
    def _placed(self) -> Bools:
        """(2, P) which placements differ, and can hold the experts."""
        space, split = self.of.space, self.family.split
        differ = (self.data > 1) & (self.ranks > 1)
        inside = split.tensor * split.context % split.expert == 0
        return np.array(
            [
                ~differ | (_PLACEMENTS[0] in space.placements),
                differ & inside & (_PLACEMENTS[1] in space.placements),
            ]
        )

    @cached_property
    def _rates(self) -> Floats:
        """(7, 2, P) the rates of both placements; see ``LayerFamily.rates``."""
        every = [self.family.rates_of(p, self.schedule) for p in self.ranks.tolist()]
        return np.array([[one[0], one[-1]] for one in every]).transpose(2, 1, 0)

    @cached_property
    def _hops(self) -> tuple[Floats, Floats]:
        """(2, 1, S, P) seconds of a hop, and of the sum of a tied table's gradients."""
        start, each, *_, tied = self._rates[:, :, None, None]
        return start + each * self.family.sent_bytes(self.samples), tied

    @cached_property
    def _exchanged(self) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """(2, P) seconds per byte of gathering the least layer, and all: held, and trained."""
        _, _, _, shared, _, expert, _ = self._rates[..., None]
        every = []
        for of in (self.family.parameters, self.family.trained):
            each = of.shared[self.kinds] * shared + of.expert[self.kinds] * expert
            whole = of.shared.sum() * shared + of.expert.sum() * expert
            every.append((each.min(axis=-1), whole[..., 0]))
        return every[0], every[1]

    @cached_property
    def _reductions(self) -> Floats:
        """(2, K, 1, P) of the exchange of a rank's mean layer only the last is seen."""
        least, whole = self._exchanged[1]
        each = np.where(self.ranks == 1, whole / (self.blocks + 2), least)
        sizes = self.problem.precision
        gradients, weights = sizes.gradient_bytes, sizes.weight_bytes
        times = np.array((2 * gradients, gradients + weights, weights, 0))[self.zeros]
        found: Floats = each[:, None, None] * times
        return found

    @cached_property
    def _updates(self) -> Floats:
        """(K, 1, P) the mean rank's update."""
        problem, sizes = self.problem, self.problem.precision
        if not problem.charges("optimizer step"):
            return np.zeros((1, 1, 1))
        trained = self.family.trained
        whole = LayerParameters(trained.shared.sum(), trained.expert.sum())
        every = []
        for zero, offload in self.of.keepings:
            number = (self.family.divided(whole, self.data) if zero else whole.all) / self.ranks
            host = problem.fabric.host_bytes_per_second
            if not offload:
                every.append(problem.processor.update_seconds(number))
            else:
                moved = number * max(sizes.gradient_bytes, sizes.weight_bytes)
                every.append(link_seconds(moved, inf if host is None else host))
        return np.array(every)[:, None]

    @cached_property
    def _again(self) -> Floats:
        """(K, S, P) seconds to recompute what is needed of a microbatch."""
        _, must, needed = self.fitting
        if not len(self.freed):
            return np.zeros_like(needed)
        again = self.family.repeated_seconds
        seconds = np.array(
            [[again(one, self.schedule, (kind,)) for one in self._sizes] for kind, _ in self.freed]
        )
        freed = np.array([[one] for _, one in self.freed])
        must = np.maximum(must, np.ceil(needed / freed.max() - ROUNDING))
        found: Floats = np.maximum(
            must * seconds.min(axis=0)[:, None], needed * (seconds / freed).min(axis=0)[:, None]
        )
        return found

    # In the search.

    @cached_property
    def least(self) -> Floats:
        """(S, P) bounds on all pipelines."""
        return np.asarray(np.minimum(self.plain, self.several).min(axis=(0, 1)))

    def places(self, samples: Ints | int, pipeline: Ints) -> tuple[Ints, Ints]:
        """The indices (S, P) of microbatches and pipelines of so many ranks, of one copy."""
        ranks = np.searchsorted(self.ranks, pipeline * self.form.copies)
        return np.searchsorted(self.of.sizes, samples), ranks

    def by_division(self, samples: Ints, pipeline: Ints, chunks: Ints) -> Floats:
        """(2, K, divisions) bounds by placement and ZeRO of every division."""
        size, ranks = self.places(samples, pipeline)
        several = self.several[:, :, size, ranks]
        return (
            several
            if self.form.in_v
            else np.where(chunks > 1, several, self.plain[:, :, size, ranks])
        )


def _filling(microbatches: Ints, ranks: Ints, part: Floats | float) -> Floats:
    """Least time of a pipeline over the work of a microbatch, by number of ranks."""
    filled = 1 - (1 - part / microbatches) ** ranks
    found: Floats = np.where(
        filled > 0, part / np.where(filled > 0, filled, 1), microbatches / ranks
    )
    return found


def _mean_stage(microbatches: Ints, ranks: Ints, part: Floats | float) -> Floats:
    """The mean position of a stage, where stages count so that all of their times count alike."""
    stays = 1 - part / microbatches
    some = np.where(stays < 1, stays, 0.5)
    before = ranks - 1 - some * (1 - some ** (ranks - 1)) / (1 - some)
    found: Floats = np.where(stays < 1, before / (1 - some**ranks), (ranks - 1) / 2)
    return found
