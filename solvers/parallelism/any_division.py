"""Closed lower bounds on pipelines of any division of the blocks, with any recomputation.

A plain pipeline of p stages and m microbatches whose stages take c_0, ..., c_(p-1) for one of them,
of which a part a at least is spent before the next stage can begin, or after it has come back,
lasts at least a (c_0 + ... + c_(s-1)) + m c_s, for every s. The mean of these in which all stages
count alike is

    (c_0 + ... + c_(p-1)) a / (1 - (1 - a/m)^p),

whatever the division: the sum is the model's. The part is 1 (forward and backward), where backwards
are split in two without their weights' part; or it is the forward's, with all of the backward. To
the sum are added the blocks that must be recomputed, as many as do not fit in the stages' memory
together, and to the time the mean rank's update. With whole forwards and backwards the mean also
has the hops to a stage and back, what of ZeRO's exchanges does not run beside all work, and the
first rank's sum of gradients. An interleaved pipeline lasts at least as long as a mean rank
computes.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.pipeline_time import RankMemory, StageCosts
from stagewright.formulations.parallelism.schedules import FORMS, Schedule, kept_forwards
from stagewright.formulations.parallelism.states import held, update_seconds
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.models.shards import LayerSplit, Recompute
from stagewright.solvers.parallelism.divisions import replicas
from stagewright.solvers.parallelism.family import LayerFamily
from stagewright.solvers.parallelism.space import Space, chosen


@dataclass(frozen=True, slots=True)
class Plain:
    """Plain pipelines that differ in their division and recomputation alone.

    None of them that fits takes less than ``bound``.
    """

    bound: float
    layout: Layout


@dataclass(frozen=True, eq=False)
class _Pipelines:
    """Plain pipelines of layers that are divided in one way; arrays are by number of ``ranks``."""

    family: LayerFamily
    ranks: Ints

    @cached_property
    def data(self) -> Ints:
        found: Ints = self.family.left // self.ranks
        return found

    def microbatches(self, samples: int) -> Ints:
        found: Ints = self.family.problem.batch // (samples * self.data)
        return found

    def allowed(self, samples: int, schedule: Schedule) -> Bools:
        """The rules that do not follow from the choice of the values."""
        left, batch = self.family.left, self.family.problem.batch
        copies = FORMS[schedule].copies
        data, _, found = replicas(self.ranks // copies, 1, left, batch, samples, schedule)
        if copies > 1:
            found = found & (self.ranks % copies == 0) & (self.ranks >= 2 * copies)
        return found & self.family.can_divide_experts(data, schedule)

    @cached_property
    def alone(self) -> Bools:
        """Pipelines in which no two ranks have the same parameters."""
        return self.family.are_alone(self.data)


ROUNDING = 1e-9


class AnyDivision:
    """The plain pipelines of a space, and the bound on its interleaved ones."""

    def __init__(self, problem: TrainingProblem, space: Space) -> None:
        self.problem, self.space = problem, space
        self._families = list(self._pipelines())
        self._parts: dict[tuple[LayerSplit, int, Schedule], float] = {}

    @cached_property
    def _repeats(self) -> list[Recompute]:
        """The kinds of recomputation of a space; "none" if the space allows nothing else."""
        return [one for one in self.space.recomputes(self.problem) if one != "none"] or ["none"]

    @property
    def _most_repeated(self) -> Recompute:
        return "none" if self._repeats == ["none"] else "full"

    def _pipelines(self) -> Iterator[_Pipelines]:
        """For every way to divide layers, the numbers of stages that are possible."""
        blocks = self.problem.architecture.layers
        for split in self.space.families(self.problem):
            family = LayerFamily(self.problem, split)
            data = chosen(self.space.data, family.left)
            ranks = [
                p
                for p in chosen(self.space.pipeline, family.left)
                if 2 <= p <= blocks + 2 and family.left // p in data
            ]
            if ranks:
                yield _Pipelines(family, np.array(ranks))

    def interleaved(self) -> float:
        """A bound on pipelines with several stages on a rank; infinite if the space has none."""
        several = [one for one in self.space.schedules if self._has_several(one)]
        least = inf
        for bounds in sorted(self._families, key=self._evenly):
            if self._evenly(bounds) >= least:
                break
            for samples in chosen(self.space.microbatch, self.problem.batch):
                for schedule in several:
                    allowed = bounds.allowed(samples, schedule)
                    if allowed.any():
                        busy = self._busy(bounds, samples, schedule)[allowed]
                        least = min(least, float(busy.min()))
        return least

    def _has_several(self, schedule: Schedule) -> bool:
        form = FORMS[schedule]
        return form.copies > 1 or (form.chunks != 1 and self.space.chunks > 1)

    @property
    def _plain(self) -> list[Schedule]:
        """The schedules with one stage on a rank."""
        return [one for one in self.space.schedules if not FORMS[one].in_v]

    def _evenly(self, bounds: _Pipelines) -> float:
        """The work of all samples at once, as little as it can be, spread evenly over all ranks."""
        work = bounds.family.work(self.problem.batch, "none")
        return float(work.total.sum()) / bounds.family.left

    def _busy(self, bounds: _Pipelines, samples: int, schedule: Schedule) -> Floats:
        """Seconds that a mean rank computes, for every number of stages."""
        work = float(bounds.family.work(samples, "none", schedule).total.sum())
        found: Floats = bounds.microbatches(samples) * work / bounds.ranks
        return found

    def plain(self, below: Callable[[], float]) -> Iterator[Plain]:
        """The plain pipelines by ascending bound, while bounds are below the best known time."""
        heap: list[tuple[float, int, bool, Layout]] = []
        numbers = itertools.count()
        for bound, layout in self._closed(below()):
            heapq.heappush(heap, (bound, next(numbers), False, layout))
        while heap and heap[0][0] < below():
            bound, _, is_last, layout = heapq.heappop(heap)
            if is_last:
                yield Plain(bound, layout)
                continue
            for inner, placed in self._placed(layout):
                if max(bound, inner) < below():
                    heapq.heappush(heap, (max(bound, inner), next(numbers), True, placed))

    def _closed(self, below: float) -> Iterator[tuple[float, Layout]]:
        """Bounds without the blocks that must be recomputed."""
        for bounds in self._families:
            if self._evenly(bounds) >= below:
                continue
            for samples in chosen(self.space.microbatch, self.problem.batch):
                for schedule in self._plain:
                    allowed = bounds.allowed(samples, schedule)
                    allowed &= self._busy(bounds, samples, schedule) < below
                    if not allowed.any():
                        continue
                    least = self._filled(bounds, samples, schedule)
                    for place in np.flatnonzero(allowed & (least < below)):
                        for layout in self._kept(bounds, samples, schedule, int(place)):
                            yield float(least[place]), layout

    def _filled(self, bounds: _Pipelines, samples: int, schedule: Schedule) -> Floats:
        """The bound of the module's text for every number of stages."""
        work, m = bounds.family.work(samples, "none", schedule), bounds.microbatches(samples)
        total, ranks = float(work.total.sum()), bounds.ranks
        there = (total - float(work.weight.sum())) * _filling(m, ranks, 1.0)
        part = self._part(bounds.family, samples, schedule)
        found: Floats = np.maximum(there, total * _filling(m, ranks, part))
        return found

    def _part(self, family: LayerFamily, samples: int, schedule: Schedule) -> float:
        """The forward's part of the work, at the least."""
        key = family.split, samples, schedule
        if key not in self._parts:
            # Any layer may be recomputed, which only lengthens its backward.
            longest = family.work(samples, self._most_repeated, schedule)
            self._parts[key] = float((longest.forward / longest.total).min())
        return self._parts[key]

    def _kept(
        self, bounds: _Pipelines, samples: int, schedule: Schedule, place: int
    ) -> Iterator[Layout]:
        split = bounds.family.split
        for zero, offload in itertools.product(self.space.zero, self.space.offload):
            if zero > min(self.space.zero) and bounds.alone[place]:
                continue
            yield Layout(
                pipeline=int(bounds.ranks[place]),
                tensor=split.tensor,
                context=split.context,
                data=int(bounds.data[place]),
                expert=split.expert,
                microbatch=samples,
                schedule=schedule,
                sequence_parallel=split.sequence_parallel,
                zero=zero,
                offload_optimizer=offload,
            )

    def _placed(self, layout: Layout) -> Iterator[tuple[float, Layout]]:
        """The layout's placements with bounds on all that depends on them; none if nothing fits."""
        family = next(one.family for one in self._families if one.family.split == layout.split)
        again = self._fewest(StageCosts(self.problem, layout, family.shares), family)
        if again is None:
            return
        every = tuple((share, "none", 1) for share in family.shares.every)
        update = update_seconds(self.problem, layout, held(every, tied=False)) / layout.pipeline
        for one in self.space.placements_of(layout):
            placed = replace(layout, placement=one)
            yield self._with_exchanges(placed, family, again) + update, placed

    def _with_exchanges(self, layout: Layout, family: LayerFamily, again: float) -> float:
        """The bound with recomputation, hops, ZeRO's exchanges and a rank's sum of gradients."""
        sizes, samples = self.problem.precision, layout.microbatch
        schedule, p = layout.schedule, layout.pipeline
        m = layout.microbatches(self.problem.batch)
        rates = family.rates_of(p, schedule)[-(layout.placement == "pipeline-inside")].tolist()
        start, each, _, shared, _, expert, tied = rates
        hop = start + each * family.sent_bytes(samples)
        gathered, trained = (
            one.shared * shared + one.expert * expert for one in (family.parameters, family.trained)
        )
        gradients, weights = trained * sizes.gradient_bytes, trained * sizes.weight_bytes
        work = family.work(samples, "none", schedule)
        forward, total = float(work.forward.sum()), float(work.total.sum()) + again
        returned = total - float(work.weight.sum())
        moved = float(gathered.sum()) * sizes.weight_bytes * (layout.zero == 3)
        there = self._beside(forward, moved)
        moved += float(gradients.sum()) * (layout.zero >= 2)
        there += self._beside(returned - forward, moved)
        # The exchange of a rank's mean layer, of which only the last is seen.
        last = (2 * gradients, gradients + weights, weights, 0 * weights)[layout.zero].min()
        part = self._part(family, samples, schedule)
        least = _last_weight(m, p, part) * (there - returned)
        found: float = float(last) + max(
            there * float(_filling(m, p, 1.0)) + 2 * hop * _mean_stage(m, p, 1.0) + tied,
            (total + least) * float(_filling(m, p, part)) + hop * _mean_stage(m, p, part),
            m * _slowest_stage(work.total, p),
        )
        return found

    def _beside(self, work: float, moved: float) -> float:
        """Seconds of all stages' work and exchanges, at the least; see ``StageCosts.beside``.

        With a contention of at most 1, a sum of stages takes no less than their sums.
        """
        if not self.problem.overlap:
            return work + moved
        contention = min(self.problem.reached.contention, 1.0)
        return max(work, moved) + contention * min(work, moved)

    def _fewest(self, costs: StageCosts, family: LayerFamily) -> float | None:
        """Seconds of the recomputation that makes a microbatch fit; None if it never fits."""
        layout, saved, m = costs.layout, self.problem.processor.saved_bytes, costs.layout.microbatch
        kinds, p = family.shares.kinds, layout.pipeline
        alone = [costs.memory(((one, "none", 1),), 0.0) for one in kinds]
        state = min(map(_state, alone))
        whole = m * min(saved(one, "none") for one in kinds)
        least = m * min(saved(one, kind) for one in kinds for kind in self._repeats)
        again = m * min(saved(x, "none") - saved(x, kind) for x in kinds for kind in self._repeats)
        ranks, number = np.arange(p), layout.microbatches(self.problem.batch)
        kept = kept_forwards(layout.schedule, p, 1, number, ranks, np.zeros_like(ranks))
        room = np.full(p, self.problem.fabric.memory_bytes * (1 + RELATIVE_TOLERANCE))
        room -= self.problem.reserve_bytes
        for rank, end in ((0, family.shares.embedding), (-1, family.shares.head)):
            room[rank] -= _state(costs.memory(((end, "none", 1),), 0.0))
            room[rank] -= kept[rank] * m * saved(end, "none")
        if room.min() < 0:
            return None
        blocks = self.problem.architecture.layers
        room -= min(one.buffers for one in alone)
        fit = np.maximum(room // (state + kept * whole), 0)
        # The backward of a block that is recomputed holds again what was freed.
        if np.maximum(fit, (room - again) // (state + kept * least)).sum() < blocks:
            return None
        must = max(0.0, blocks - float(fit.sum()))
        return must * family.repeated_seconds(m, layout.schedule, self._repeats)


def _slowest_stage(of_layers: Floats, stages: int) -> float:
    """The least time of the slowest stage, where all blocks take as long as the quickest."""
    first, last, block = float(of_layers[0]), float(of_layers[-1]), float(of_layers[1:-1].min())
    blocks = len(of_layers) - 2
    every = np.add.outer((0.0, first, last), block * np.arange(blocks + 1)).ravel()
    every = every[every >= max(first, last)]
    has = [np.floor((every - one) / block + ROUNDING) for one in (first, last, 0.0)]
    return float(every[has[0] + has[1] + (stages - 2) * has[2] >= blocks].min())


def _filling(microbatches: Ints | int, ranks: Ints | int, part: float) -> Floats:
    """Least time of a pipeline over the work of a microbatch, by number of ranks.

    None are allowed without a microbatch; what is found for them is not looked at.
    """
    m = np.maximum(microbatches, 1)
    found: Floats = part / (1 - (1 - part / m) ** ranks) if part else m / ranks
    return found


def _mean_stage(microbatches: int, ranks: int, part: float) -> float:
    """The mean position of a stage, where stages count so that all of their times count alike."""
    stays = 1 - part / microbatches
    if stays == 1:
        return (ranks - 1) / 2
    before = ranks - 1 - stays * (1 - stays ** (ranks - 1)) / (1 - stays)
    return before / (1 - stays**ranks)


def _last_weight(microbatches: int, ranks: int, part: float) -> float:
    """How much the first stage counts, which counts least, over the last stage."""
    found: float = (1 - part / microbatches) ** (ranks - 1)
    return found


def _state(of: RankMemory) -> float:
    return of.weights + of.gradients + of.optimizer
