"""The space of layouts as a tree, whose parts have lower bounds; see ``search``."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout, Placement, Schedule
from stagewright.formulations.parallelism.parts import Parts
from stagewright.formulations.parallelism.pipeline_time import Walk, walk
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.models.shards import Recompute, Split
from stagewright.solvers.parallelism.bounds import Bounds, Keeping, Work
from stagewright.solvers.parallelism.divisions import Table, divisions
from stagewright.solvers.parallelism.space import Space, chosen


@cache
def compiled_walk() -> Walk:
    """The schedule's walk, compiled."""
    from numba import njit

    made: Walk = njit(cache=True)(walk)
    return made


Part = Callable[[], "Iterator[Child]"]
Child = tuple[float, Part]
"""A part of the space: the bound on its layouts' time, and what divides it further."""


class Tree:
    """The space, and the best layouts found in it."""

    def __init__(
        self,
        problem: TrainingProblem,
        space: Space,
        keep: int,
        memory_bytes: float | None,
        accept: Callable[[Layout], bool],
    ) -> None:
        self.accept = accept
        self.problem, self.space, self.keep = problem, space, keep
        self.memory = problem.fabric.memory_bytes if memory_bytes is None else memory_bytes
        # Bounds add the same bytes in another order: they must not rule out what just fits.
        self.about_memory = self.memory * (1 + RELATIVE_TOLERANCE)
        self.best: list[Estimate] = []
        self.examined = 0
        self._tables: dict[int, Table | None] = {}

    @property
    def worst(self) -> float:
        """The time from which a layout is not among the best."""
        return self.best[-1].seconds if len(self.best) == self.keep else math.inf

    def families(self) -> Iterator[Child]:
        """Step 1."""
        for split in self.space.families(self.problem):
            table = self._table(split)
            if table is None:
                continue
            bounds = Bounds(self.problem, split, table)
            work = bounds.work(self.problem.batch, "none")
            yield self._spread(bounds, self.problem.batch, work), self._of_split(bounds)

    def _table(self, split: Split) -> Table | None:
        """The divisions for the devices that are left beside t and c; None if there are none."""
        left = self.problem.fabric.devices // (split.tensor * split.context)
        if left not in self._tables:
            blocks = self.problem.architecture.layers
            data = chosen(self.space.data, left)
            pipelines = chosen(self.space.pipeline, left)
            fitting = [p for p in pipelines if p <= blocks + 2 and left // p in data]
            found = divisions(blocks, fitting, self.space.chunks)
            self._tables[left] = Table(found) if found else None
        return self._tables[left]

    def _spread(self, bounds: Bounds, samples: int, work: Work) -> float:
        """All work spread evenly over the ranks: each replica has B / d samples and p ranks."""
        replicas = self.problem.fabric.devices / (bounds.split.tensor * bounds.split.context)
        return float(work.total.sum()) * self.problem.batch / samples / replicas

    def _of_split(self, bounds: Bounds) -> Part:
        """Step 2."""

        def parts() -> Iterator[Child]:
            for samples in chosen(self.space.microbatch, self.problem.batch):
                for recompute in self._recomputes:
                    # Recomputation of some blocks takes at least as long as that of none.
                    least = "none" if self._is_some(recompute) else recompute
                    bound = self._spread(bounds, samples, bounds.work(samples, least))
                    yield bound, self._of_work(bounds, samples, recompute, least)

        return parts

    @cached_property
    def _recomputes(self) -> tuple[Recompute, ...]:
        """The choices of step 2; with some blocks recomputed there may be none of them."""
        every = self.space.recomputes(self.problem)
        some = any(map(self._is_some, every))
        return tuple(one for one in every if not (some and one == "none"))

    def _is_some(self, recompute: Recompute) -> bool:
        return recompute == "full" and self.space.partial

    def _of_work(
        self, bounds: Bounds, samples: int, recompute: Recompute, least: Recompute
    ) -> Part:
        """Step 3."""

        def parts() -> Iterator[Child]:
            for schedule in self.space.schedules:
                work = bounds.work(samples, least, schedule)
                longest = bounds.work(samples, recompute, schedule)
                allowed = bounds.allowed(samples, schedule)
                filled = bounds.filled(samples, schedule, work)
                open_ = allowed & (bounds.table.most(np.maximum(*filled)) < self.worst)
                if open_.any():
                    choice = _Choice(
                        bounds, samples, recompute, schedule, open_, filled, work, longest
                    )
                    yield from self._of_choice(choice)

        return parts

    def _of_choice(self, choice: "_Choice") -> Iterator[Child]:
        of, table = choice.bounds, choice.bounds.table
        flying = of.flying(choice.samples, choice.schedule)
        least = 0 if "none" in self.space.recompute else 1
        for zero, offload in itertools.product(self.space.zero, self.space.offload):
            keeping = Keeping(zero, offload)
            room = of.room(self.about_memory, keeping)
            fewest, again = None, np.zeros(len(table.starts))
            if self._is_some(choice.recompute):
                fewest = of.fewest(flying, room, least)
                again = of.again(choice.samples, fewest, choice.schedule)
                fits = fewest <= table.most_blocks
            else:
                fits = of.fits(flying, room, choice.recompute)
            bound = choice.least(keeping, again)
            fits &= choice.open & (bound < self.worst)
            if zero > min(self.space.zero):  # with nothing to divide by it is as with less of it
                fits &= ~of.alone
            found = np.flatnonzero(fits)
            if len(found):
                order = found[np.argsort(bound[found], kind="stable")]
                yield (
                    float(bound[order[0]]),
                    self._of_divisions(_Divided(choice, keeping, bound, fewest, order)),
                )

    def _of_divisions(self, divided: "_Divided", at: int = 0) -> Part:
        """The divisions of step 3 one after the other, by their bounds."""

        def parts() -> Iterator[Child]:
            bound, order = divided.bound, divided.order
            yield float(bound[order[at]]), self._of_division(divided, int(order[at]))
            if at + 1 < len(order):
                yield float(bound[order[at + 1]]), self._of_divisions(divided, at + 1)

        return parts

    def _of_division(self, divided: "_Divided", division: int) -> Part:
        """Step 4."""

        def parts() -> Iterator[Child]:
            some = divided.some(division)
            fitting = self._fitting(divided.choice.layout(division, divided.keeping), some)
            if fitting is None:
                return
            for placement in self._placements(fitting):
                placed = self._accepted(replace(fitting, placement=placement), some)
                if placed is not None:
                    yield self._parts(placed).least_seconds, self._of_layout(placed, some)

        return parts

    def _fitting(self, layout: Layout, some: tuple[int, int] | None) -> Layout | None:
        """The layout, if it may fit, with the fewest recomputed blocks with which it does.

        ``some`` are the fewest and the most blocks of a stage that may be recomputed.
        """
        if some is None:
            return layout if self._may_fit(layout) else None
        low, high = some
        if not self._may_fit(_recomputed(layout, high, high)):
            return None
        most = high
        while low < high:
            middle = (low + high) // 2
            if self._may_fit(_recomputed(layout, middle, most)):
                high = middle
            else:
                low = middle + 1
        return _recomputed(layout, low, most)

    def _accepted(self, layout: Layout, some: tuple[int, int] | None) -> Layout | None:
        """The layout, or that which recomputes all blocks, if it is accepted."""
        if self.accept(layout):
            return layout
        if some is None:
            return None
        most = _recomputed(layout, some[1], some[1])
        return most if self.accept(most) else None

    def _may_fit(self, layout: Layout) -> bool:
        return self._parts(layout).least_bytes <= self.about_memory

    def _parts(self, layout: Layout) -> Parts:
        """The parts of a layout; of the last one if they differ in ZeRO and the like alone."""
        plain = replace(layout, zero=0, offload_optimizer=False, placement="data-inside")
        if self._last is None or self._last.layout != plain:
            self._last = Parts(self.problem, plain)
        return self._last.varied(layout)

    _last: Parts | None = None

    def _placements(self, layout: Layout) -> tuple[Placement, ...]:
        if layout.data == 1 or layout.pipeline == 1:
            return ("data-inside",)  # both are the same
        if layout.tensor * layout.context % layout.expert:
            return tuple(one for one in self.space.placements if one == "data-inside")
        return self.space.placements

    def _of_layout(self, layout: Layout, some: tuple[int, int] | None) -> Part:
        """Step 5."""

        def parts() -> Iterator[Child]:
            found = evaluate(self.problem, layout, compiled_walk())
            self.examined += 1
            if found.peak_bytes <= self.memory:
                if found.seconds < self.worst:
                    several = [*self.best, found]
                    self.best = sorted(several, key=lambda one: one.seconds)[: self.keep]
            elif some is not None and _blocks(layout, some[1]) < some[1]:
                more = self._accepted(
                    _recomputed(layout, _blocks(layout, some[1]) + 1, some[1]), some
                )
                if more is not None:
                    yield self._parts(more).least_seconds, self._of_layout(more, some)

        return parts


@dataclass(frozen=True, slots=True)
class _Choice:
    """What steps 1 to 3 have chosen; the divisions that are still ``open``."""

    bounds: Bounds
    samples: int
    recompute: Recompute
    schedule: Schedule
    open: Bools
    filled: tuple[Floats, Floats]
    work: Work
    longest: Work

    def least(self, keeping: Keeping, again: Floats) -> Floats:
        """The bound of step 3 for every division, with what ZeRO and the update take."""
        table = self.bounds.table
        after, update = (
            self.bounds.after(keeping, self.work, self.longest),
            self.bounds.update(keeping),
        )
        each = again + self.bounds.waiting(keeping, self.work, again)
        more = self.bounds.microbatches(self.samples)[self.bounds.of] * table.sum_by_rank(each)
        there, here = self.filled
        pipeline = table.most(there + more) + after[table.first_rank]
        ends = np.maximum(pipeline, table.most(here + more + after))
        found: Floats = ends + table.most(update)
        return found

    def layout(self, division: int, keeping: Keeping) -> Layout:
        """The layout of a division."""
        of, table = self.bounds, self.bounds.table
        return Layout(
            pipeline=int(table.pipeline[division]),
            tensor=of.split.tensor,
            context=of.split.context,
            data=int(of.data[division]),
            expert=of.split.expert,
            microbatch=self.samples,
            chunks=int(table.chunks[division]),
            schedule=self.schedule,
            recompute=self.recompute,
            sequence_parallel=of.split.sequence_parallel,
            zero=keeping.zero,
            offload_optimizer=keeping.offload,
            first_blocks=table.every[division].ends[0],
            last_blocks=table.every[division].ends[1],
        )


def _recomputed(layout: Layout, blocks: int, most: int) -> Layout:
    """The layout that recomputes so many blocks of every stage, of which it has ``most``."""
    if blocks == 0:
        return replace(layout, recompute="none", recompute_blocks=None)
    return replace(layout, recompute="full", recompute_blocks=None if blocks == most else blocks)


def _blocks(layout: Layout, most: int) -> int:
    """The inverse of :func:`_recomputed`."""
    if layout.recompute == "none":
        return 0
    return most if layout.recompute_blocks is None else layout.recompute_blocks


@dataclass(frozen=True, slots=True)
class _Divided:
    """The divisions of a choice in the ``order`` of their bounds."""

    choice: _Choice
    keeping: Keeping
    bound: Floats
    fewest: Ints | None
    order: Ints

    def some(self, division: int) -> tuple[int, int] | None:
        """The fewest and the most blocks of a stage to recompute; None if that is not chosen."""
        if self.fewest is None:
            return None
        most = self.choice.bounds.table.most_blocks
        return int(self.fewest[division]), int(most[division])
