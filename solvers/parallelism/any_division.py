"""Closed lower bounds on pipelines of any division of the blocks, with any recomputation.

A plain pipeline of p stages and m microbatches whose stages take c_0, ..., c_(p-1) for one of them,
of which a part a at least is spent before the next stage can begin, or after it has come back,
lasts at least a (c_0 + ... + c_(s-1)) + m c_s, for every s. The mean of these in which all stages
count alike is

    (c_0 + ... + c_(p-1)) a / (1 - (1 - a/m)^p),

whatever the division: the sum is the model's. The part is 1 (forward and backward), where backwards
are split in two without their weights' part; or it is the forward's, with all of the backward. To
the sum are added the blocks that must be recomputed, as many as do not fit in the stages' memory
together, and to the time the mean rank's update. An interleaved pipeline lasts at least as long as
a mean rank computes.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.pipeline_time import RankMemory, StageCosts
from stagewright.formulations.parallelism.schedules import FORMS, Schedule, kept_forwards
from stagewright.formulations.parallelism.states import held, update_seconds
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.models.shards import Recompute
from stagewright.solvers.parallelism.divisions import replicas
from stagewright.solvers.parallelism.family import LayerFamily
from stagewright.solvers.parallelism.space import Space, chosen


@dataclass(frozen=True, slots=True)
class Plain:
    """Plain pipelines that differ in their division, recomputation and placement alone.

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


class AnyDivision:
    """The plain pipelines of a space, and the bound on its interleaved ones."""

    def __init__(self, problem: TrainingProblem, space: Space) -> None:
        self.problem, self.space = problem, space
        self._families = list(self._pipelines())

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
            bound, number, is_last, layout = heapq.heappop(heap)
            if is_last:
                yield Plain(bound, layout)
                continue
            bound = max(bound, self._with_memory(layout))
            if bound < below():
                heapq.heappush(heap, (bound, number, True, layout))

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
                    least = self._filled(bounds, samples, schedule, 0.0)
                    for place in np.flatnonzero(allowed & (least < below)):
                        for layout in self._kept(bounds, samples, schedule, int(place)):
                            yield float(least[place]), layout

    def _filled(self, bounds: _Pipelines, samples: int, schedule: Schedule, again: float) -> Floats:
        """The bound of the module's text for every number of stages, with ``again`` more work."""
        work, m = bounds.family.work(samples, "none", schedule), bounds.microbatches(samples)
        ranks, total = bounds.ranks, float(work.total.sum()) + again
        # Any layer may be recomputed, which only lengthens its backward.
        longest = bounds.family.work(samples, self._most_repeated, schedule)
        part = float((longest.forward / longest.total).min())
        there = (total - float(work.weight.sum())) * _filling(m, ranks, 1.0)
        found: Floats = np.maximum(there, total * _filling(m, ranks, part))
        return found

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

    def _with_memory(self, layout: Layout) -> float:
        """The bound with the necessary recomputation and the update; infinite if nothing fits."""
        bounds = next(one for one in self._families if one.family.split == layout.split)
        place = int(np.flatnonzero(bounds.ranks == layout.pipeline)[0])
        again = self._fewest(layout, bounds)
        if again is None:
            return inf
        filled = self._filled(bounds, layout.microbatch, layout.schedule, again)
        return float(filled[place]) + self._mean_update(layout, bounds)

    def _mean_update(self, layout: Layout, bounds: _Pipelines) -> float:
        every = tuple((share, "none", 1) for share in bounds.family.shares.every)
        return update_seconds(self.problem, layout, held(every, tied=False)) / layout.pipeline

    def _fewest(self, layout: Layout, bounds: _Pipelines) -> float | None:
        """Seconds of the recomputation that makes a microbatch fit; None if it never fits."""
        saved, samples = self.problem.processor.saved_bytes, layout.microbatch
        kinds = bounds.family.shares.kinds
        costs = StageCosts(self.problem, layout, bounds.family.shares)
        state = min(_state(costs.memory(((one, "none", 1),), 0.0)) for one in kinds)
        whole = samples * min(saved(one, "none") for one in kinds)
        least = samples * min(saved(one, kind) for one in kinds for kind in self._repeats)
        ranks = np.arange(layout.pipeline)
        m = layout.microbatches(self.problem.batch)
        kept = kept_forwards(layout.schedule, layout.pipeline, 1, m, ranks, np.zeros_like(ranks))
        room = self.problem.fabric.memory_bytes - self.problem.reserve_bytes
        blocks = self.problem.architecture.layers
        if (room // (state + kept * least)).sum() < blocks:
            return None
        must = max(0.0, blocks - float((room // (state + kept * whole)).sum()))
        each = bounds.family.repeated_seconds(samples, layout.schedule, self._repeats)
        return must * each


def _filling(microbatches: Ints, ranks: Ints, part: float) -> Floats:
    """Least time of a pipeline over the work of a microbatch, by number of ranks.

    None are allowed without a microbatch; what is found for them is not looked at.
    """
    m = np.maximum(microbatches, 1)
    found: Floats = part / (1 - (1 - part / m) ** ranks) if part else m / ranks
    return found


def _state(of: RankMemory) -> float:
    return of.weights + of.gradients + of.optimizer
