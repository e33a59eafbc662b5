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

from stagewright.formulations.parallelism.layout import Layout, Schedule
from stagewright.formulations.parallelism.pipeline_time import kept_forwards
from stagewright.formulations.parallelism.stage_costs import RankMemory, StageCosts
from stagewright.formulations.parallelism.states import held, update_seconds
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.models.shards import Recompute
from stagewright.solvers.parallelism.bounds import Bounds
from stagewright.solvers.parallelism.divisions import Division, Table
from stagewright.solvers.parallelism.space import Space, chosen
from stagewright.solvers.parallelism.stage_options import even_division


@dataclass(frozen=True, slots=True)
class Plain:
    """Plain pipelines that differ in their division, recomputation and placement alone.

    None of them that fits takes less than ``bound``.
    """

    bound: float
    layout: Layout


class AnyDivision:
    """The plain pipelines of a space, and the bound on its interleaved ones."""

    def __init__(self, problem: TrainingProblem, space: Space) -> None:
        self.problem, self.space = problem, space
        self._families = list(self._bounds())

    @cached_property
    def _repeats(self) -> list[Recompute]:
        """The kinds of recomputation; none if there is no other."""
        return [one for one in self.space.recomputes(self.problem) if one != "none"] or ["none"]

    @property
    def _most_repeated(self) -> Recompute:
        return "full" if "full" in self._repeats else self._repeats[0]

    def _bounds(self) -> Iterator[Bounds]:
        """For every way to divide layers; the divisions in it stand for all with as many stages."""
        blocks = self.problem.architecture.layers
        tables: dict[int, Table | None] = {}
        for split in self.space.families(self.problem):
            left = self.problem.fabric.devices // (split.tensor * split.context)
            if left not in tables:
                data = chosen(self.space.data, left)
                pipelines = [
                    p
                    for p in chosen(self.space.pipeline, left)
                    if 2 <= p <= blocks + 2 and left // p in data
                ]
                every = [Division(p, 1, (None, None), even_division(p, blocks)) for p in pipelines]
                tables[left] = Table(every) if every else None
            table = tables[left]
            if table is not None:
                yield Bounds(self.problem, split, table)

    def interleaved(self) -> float:
        """No pipeline with several stages on a rank takes less; infinite if there are none."""
        if self.space.chunks == 1:
            return inf
        least = inf
        for bounds in self._families:
            for samples in chosen(self.space.microbatch, self.problem.batch):
                for schedule in self.space.schedules:
                    allowed = bounds.allowed(samples, schedule)
                    if allowed.any():
                        busy = self._busy(bounds, samples, schedule)[allowed]
                        least = min(least, float(busy.min()))
        return least

    def _busy(self, bounds: Bounds, samples: int, schedule: Schedule) -> Floats:
        """Seconds that a mean rank computes, for every number of stages."""
        work = float(bounds.work(samples, "none", schedule).total.sum())
        found: Floats = bounds.microbatches(samples) * work / bounds.table.pipeline
        return found

    def plain(self, below: Callable[[], float]) -> Iterator[Plain]:
        """The plain pipelines by their bounds, as long as these are below what is known by then."""
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
            for samples in chosen(self.space.microbatch, self.problem.batch):
                for schedule in self.space.schedules:
                    allowed = bounds.allowed(samples, schedule)
                    allowed &= self._busy(bounds, samples, schedule) < below
                    if not allowed.any():
                        continue
                    least = self._filled(bounds, samples, schedule, 0.0)
                    for place in np.flatnonzero(allowed & (least < below)):
                        for layout in self._kept(bounds, samples, schedule, int(place)):
                            yield float(least[place]), layout

    def _filled(self, bounds: Bounds, samples: int, schedule: Schedule, again: float) -> Floats:
        """The bound of the module's text for every number of stages, with ``again`` more work."""
        work, m = bounds.work(samples, "none", schedule), bounds.microbatches(samples)
        ranks, total = bounds.table.pipeline, float(work.total.sum()) + again
        # Any layer may be recomputed, which only lengthens its backward.
        longest = bounds.work(samples, self._most_repeated, schedule)
        part = float((longest.forward / longest.total).min())
        there = (total - float(work.weight.sum())) * _filling(m, ranks, 1.0)
        found: Floats = np.maximum(there, total * _filling(m, ranks, part))
        return found

    def _kept(
        self, bounds: Bounds, samples: int, schedule: Schedule, place: int
    ) -> Iterator[Layout]:
        split = bounds.split
        for zero, offload in itertools.product(self.space.zero, self.space.offload):
            if zero > min(self.space.zero) and bounds.alone[place]:
                continue
            yield Layout(
                pipeline=int(bounds.table.pipeline[place]),
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
        """The bound with what must be recomputed, and the update; infinite if none fits."""
        bounds = next(one for one in self._families if one.split == layout.split)
        place = int(np.flatnonzero(bounds.table.pipeline == layout.pipeline)[0])
        again = self._fewest(layout, bounds)
        if again is None:
            return inf
        filled = self._filled(bounds, layout.microbatch, layout.schedule, again)
        return float(filled[place]) + self._mean_update(layout, bounds)

    def _mean_update(self, layout: Layout, bounds: Bounds) -> float:
        every = tuple((share, False, 1) for share in bounds.shares.every)
        return update_seconds(self.problem, layout, held(every, tied=False)) / layout.pipeline

    def _fewest(self, layout: Layout, bounds: Bounds) -> float | None:
        """Seconds to recompute, per microbatch, what does not fit; None if it never does."""
        size, samples = self.problem.precision.activation_bytes, layout.microbatch
        kinds, costs = bounds.shares.kinds, StageCosts(self.problem, layout, bounds.shares)
        state = min(_state(costs.memory(((one, False, 1),), 0.0)) for one in kinds)
        whole = samples * min(one.saved_bytes(size, "none") for one in kinds)
        least = samples * min(
            one.saved_bytes(size, kind) for one in kinds for kind in self._repeats
        )
        ranks = np.arange(layout.pipeline)
        m, split = layout.microbatches(self.problem.batch), layout.schedule == "zero-bubble"
        kept = kept_forwards(layout.pipeline, 1, m, split, ranks, np.zeros_like(ranks))
        room = self.problem.fabric.memory_bytes - self.problem.reserve_bytes
        blocks = self.problem.architecture.layers
        if (room // (state + kept * least)).sum() < blocks:
            return None
        must = max(0.0, blocks - float((room // (state + kept * whole)).sum()))
        return must * self._again(layout, bounds)

    def _again(self, layout: Layout, bounds: Bounds) -> float:
        """The least seconds by which recomputation makes the backward of a block longer."""
        plain, *every = (
            bounds.times(layout.microbatch, kind, layout.schedule)
            for kind in ("none", *self._repeats)
        )
        kinds = bounds.shares.kinds
        return min(times(one).backward - plain(one).backward for one in kinds for times in every)


def _filling(microbatches: Ints, ranks: Ints, part: float) -> Floats:
    """How many times the work of a microbatch a pipeline lasts at least, by its ranks.

    None are allowed without a microbatch; what is found for them is not looked at.
    """
    m = np.maximum(microbatches, 1)
    found: Floats = part / (1 - (1 - part / m) ** ranks) if part else m / ranks
    return found


def _state(of: RankMemory) -> float:
    return of.weights + of.gradients + of.optimizer
