"""The space of layouts as a tree, whose parts have lower bounds; see ``search``."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from typing import get_args

import numpy as np

from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout, Placement
from stagewright.formulations.parallelism.parts import Parts
from stagewright.formulations.parallelism.pipeline_time import Walk, walk
from stagewright.formulations.parallelism.schedules import FORMS, Schedule
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Bools, Floats
from stagewright.graphs.models.modules import OFFLOAD, modules_of
from stagewright.graphs.models.shards import Recompute
from stagewright.solvers.parallelism.any_division import any_division
from stagewright.solvers.parallelism.bounds import Bounds, Keeping, Sized, sized
from stagewright.solvers.parallelism.choices import (
    Choice,
    DividedChoice,
    divided,
    divided_by_modules,
)
from stagewright.solvers.parallelism.divisions import DivisionGroups, DivisionTable, groups
from stagewright.solvers.parallelism.family import LayerFamily
from stagewright.solvers.parallelism.space import (
    Space,
    blocks_recomputed,
    chosen,
    least_place,
    plainest,
    simple_first,
    with_recomputed,
)

_MOST_ENTRIES = 100_000  # stages of all divisions that are bounded at once


@cache
def compiled_walk() -> Walk:
    """The walk through a schedule's events, compiled."""
    from numba import njit

    made: Walk = njit(cache=True)(walk)
    return made


@lru_cache(maxsize=128)
def _divisions(
    space: Space, layers: int, left: int, schedule: Schedule
) -> tuple[DivisionTable, DivisionGroups]:
    """The nearly even divisions for the devices that are left beside t and c; all others."""
    pipelines, chunks = space.pipelines(left, schedule)
    found = groups(layers, pipelines, chunks, in_v=FORMS[schedule].in_v)
    share = layers // found.stages
    few = (found.stages <= 2) | (found.middle == share) | (found.middle == share + 1)
    near = found.only(few).table()
    return near.only(near.is_nearly_even), found.only(found.stages > 2)


@lru_cache(maxsize=128)
def _sized(space: Space, layers: int, left: int, batch: int, schedule: Schedule) -> Sized | None:
    """The nearly even divisions for all microbatches of a batch."""
    table, _ = _divisions(space, layers, left, schedule)
    return sized(table, left, batch, chosen(space.microbatch, batch), schedule)


Part = Callable[[], "Iterator[_Child]"]
_Child = tuple[float, Part]
"""A part of the space: the bound on its layouts' time, and what divides it further."""


class Tree:
    """The space, the best layouts found in it, no two of which are ``alike``, and the others."""

    def __init__(
        self,
        problem: TrainingProblem,
        space: Space,
        keep: int,
        memory_bytes: float | None,
        accept: Callable[[Layout], bool],
        alike: Callable[[Layout], Hashable],
        known: Callable[[Layout], bool] | None,
    ) -> None:
        self.accept, self.alike, self._known = accept, alike, known
        self.problem, self.space, self.keep = problem, space, keep
        self._offload: list[Recompute] = [OFFLOAD] if space.offloads(problem) else []
        self.memory = problem.fabric.memory_bytes if memory_bytes is None else memory_bytes
        # Bounds add the same bytes in another order: they must not rule out what just fits.
        self.about_memory = self.memory * (1 + RELATIVE_TOLERANCE)
        self.any_division = any_division(problem, space, self.memory)
        self.best: list[Estimate] = []
        self.folded: list[Estimate] = []
        self.examined = 0
        self.postponed: list[_Child] = []

    def known(self, layout: Layout) -> bool:
        """Whether the prices of the layout's degrees, placement and ZeRO stage are known."""
        return self._known is None or self._known(layout)

    @property
    def worst(self) -> float:
        """The time from which a layout is not among the best."""
        return self.best[-1].seconds if len(self.best) == self.keep else math.inf

    @property
    def least(self) -> float:
        """The best layout's seconds, infinite without any."""
        return self.best[0].seconds if self.best else math.inf

    def families(self) -> Iterator[_Child]:
        """Step 1: parts by the division of layers among ranks."""
        for evenly, family in self.any_division.families:
            split = family.split
            layer = Layout(1, split.tensor, split.context, family.left, split.expert)
            some = any(len(self._divisions(family.left, one)[0]) for one in self.space.schedules)
            if self.known(layer) and some:
                yield evenly, partial(self._of_split, family, evenly)

    def _divisions(self, left: int, schedule: Schedule) -> tuple[DivisionTable, DivisionGroups]:
        return _divisions(self.space, self.problem.architecture.layers, left, schedule)

    def _spread(self, family: LayerFamily, samples: int, recompute: Recompute) -> float:
        """All work spread evenly over the ranks: each replica has B / d samples and p ranks."""
        replicas = self.problem.fabric.devices / family.replica
        work = family.least_work(samples, recompute, self.space.schedules)
        return work * self.problem.batch / samples / replicas

    def _of_split(self, family: LayerFamily, evenly: float) -> Iterator[_Child]:
        """Step 2: parts by schedule and kind of recomputation."""
        for schedule in self.space.schedules:
            if self.known(plainest(schedule)):
                bound = max(evenly, self.any_division.pipelines(family, schedule))
                yield bound, partial(self._of_schedule, family, schedule)

    def _of_schedule(self, family: LayerFamily, schedule: Schedule) -> Iterator[_Child]:
        layers, batch = self.problem.architecture.layers, self.problem.batch
        of = _sized(self.space, layers, family.left, batch, schedule)
        if of is not None:
            for recompute in self._recomputes:
                yield from self._choices(family, of, recompute)

    def _choices(self, family: LayerFamily, of: Sized, recompute: Recompute) -> Iterator[_Child]:
        """Divisions for all microbatches whose bound is below the worst time."""
        # Recomputation of some blocks takes at least as long as that of none.
        least = "none" if self._is_some(recompute) else recompute
        closed = self.any_division.of(family, of.schedule)
        bound = closed.least
        if least != "none":
            spread = [self._spread(family, one, least) for one in of.sizes]
            bound = np.maximum(bound, np.array(spread)[:, None])
        choice = Choice(Bounds(closed, of), recompute, least, of.schedule)
        rows = bound[closed.places(of.samples, of.table.pipeline)]
        for some in (of.table.pipeline == 1, of.table.pipeline > 1):
            if some.any():
                yield float(rows[some].min()), partial(self._near_rows, choice, some, rows)
        if self.space.uneven:
            for samples, one in zip(of.sizes, bound.min(axis=1).tolist(), strict=True):
                if one < self.worst:
                    self.postponed.append((one, partial(self._uneven, choice, samples)))

    def _near_rows(self, choice: Choice, some: Bools, rows: Floats) -> Iterator[_Child]:
        """Some of the divisions, whose closed bounds (``rows``) are below the worst time."""
        choice = replace(choice, bounds=choice.bounds.only(some & (rows < self.worst)))
        if len(choice.bounds.table):
            yield float(choice.seconds.min()), self._of_choice(choice)

    @cached_property
    def _sets(self) -> list[Recompute]:
        """The sets of modules that may be recomputed."""
        return [one for one in self.space.recomputes(self.problem) if modules_of(one)]

    @cached_property
    def _recomputes(self) -> tuple[Recompute, ...]:
        """Other kinds of recomputation (step 2), without "none" if some blocks may be recomputed.

        Sets of modules and offload need one of these two, whose bounds hold for them too.
        """
        every = [one for one in self.space.recomputes(self.problem) if not modules_of(one)]
        some = any(map(self._is_some, every))
        if (self._sets or self._offload) and not some and "none" not in every:
            every.append("none")
        return tuple(one for one in every if not (some and one == "none"))

    def _is_some(self, recompute: Recompute) -> bool:
        return recompute == "full" and self.space.partial

    def _uneven(self, choice: Choice, samples: int) -> Iterator[_Child]:
        """Step 2 for the divisions that are not nearly even, which are seldom the best."""
        others = self._divisions(choice.bounds.family.left, choice.schedule)[1]
        closed = choice.bounds.any_division
        bound = closed.least[closed.places(samples, others.pipeline)]
        near = bound < self.worst
        others, bound = others.only(near), bound[near]
        order = np.argsort(bound, kind="stable")
        yield from self._groups(choice, samples, others.only(order), bound[order])

    def _groups(
        self, choice: Choice, samples: int, of: DivisionGroups, bound: Floats
    ) -> Iterator[_Child]:
        """Groups in the order of their bounds, as many at once as is well for the arrays."""
        if len(bound) and bound[0] < self.worst:
            yield float(bound[0]), partial(self._of_groups, choice, samples, of, bound)

    def _of_groups(
        self, choice: Choice, samples: int, of: DivisionGroups, bound: Floats
    ) -> Iterator[_Child]:
        """Step 2: groups of divisions that are not nearly even."""
        entries = np.cumsum(of.divisions * of.stages)
        many = max(1, int(np.searchsorted(entries, _MOST_ENTRIES)))
        table = of.only((bound < self.worst) & (np.arange(len(bound)) < many)).table()
        inner = self._better(choice, samples, table.only(~table.is_nearly_even))
        if inner is not None:
            yield float(inner.seconds.min()), self._of_choice(inner)
        rest = of.only(np.arange(many, len(bound)))
        yield from self._groups(choice, samples, rest, bound[many:])

    def _better(self, choice: Choice, samples: int, table: DivisionTable) -> Choice | None:
        """The choice with the divisions of a table that have a bound below the worst time."""
        family = choice.bounds.family
        of = sized(table, family.left, self.problem.batch, (samples,), choice.schedule)
        if of is None:
            return None
        choice = self._near(replace(choice, bounds=Bounds(choice.bounds.any_division, of)))
        return choice if len(choice.bounds.table) else None

    def _chained(
        self, of: DividedChoice | None, attempt: Callable[[DividedChoice, int], None], at: int = 0
    ) -> Iterator[_Child]:
        """Parts that try divisions in order of their bounds, each after the one before."""
        if of is None or at == len(of.order) or of.bound[of.order[at]] >= self.worst:
            return
        place = int(of.order[at])

        def parts() -> Iterator[_Child]:
            attempt(of, place)
            yield from self._chained(of, attempt, at + 1)

        yield float(of.bound[place]), parts

    def _near(self, choice: Choice) -> Choice:
        """The choice with the divisions whose bound is below the worst time."""
        near = choice.seconds < self.worst
        if near.all():
            return choice
        return replace(choice, bounds=choice.bounds.only(near))

    def _of_choice(self, whole: Choice) -> Part:
        """Step 3: parts by ZeRO stage, offloading, placement and pipeline."""

        def parts() -> Iterator[_Child]:
            choice = self._near(whole)
            fewest = int("none" not in self.space.recompute)
            least = fewest if self._is_some(choice.recompute) else None
            sets = self._frontier(choice, *choice.bounds.sized.sizes)
            # What modules take longer hides at most as much as all blocks would.
            longest = choice if choice.recompute == "full" else replace(choice, recompute="full")
            kept = choice.bounds.kept("none") if sets else np.zeros(0)
            every = itertools.product(self.space.zero, self.space.offload)
            for zero, offload in every if len(choice.bounds.table) else ():
                several = (Keeping(zero, offload, one) for one in get_args(Placement))
                placed = [(x, y) for x in several if (y := self._differing(choice, x)).any()]
                if not placed:
                    continue
                room = choice.bounds.room(self.about_memory, placed[0][0])
                if least is not None or choice.recompute in self.space.recompute:
                    for found in divided(choice, placed, room, least, self.worst):
                        yield from self._chained(found, self._try_division)
                for (keeping, differs), modules in itertools.product(placed, sets):
                    if "none" in self.space.recompute:
                        # What fits with nothing recomputed is slower with modules.
                        differs = differs & ~choice.bounds.fits(kept - room)
                    found = divided_by_modules(longest, keeping, room, modules, self.worst, differs)
                    yield from self._chained(found, partial(self._try_sets, [modules]))

        return parts

    def _differing(self, choice: Choice, keeping: Keeping) -> Bools:
        """Divisions whose bounds are below the worst time, with known prices."""
        differs = (choice.seconds < self.worst) & (choice.bounds.closed_of(keeping) < self.worst)
        if keeping.zero < 2 or self._known is None:
            return differs  # the degrees are known
        found, pipeline = np.zeros_like(differs), choice.bounds.table.pipeline
        for one in np.unique(pipeline[differs]):
            same = differs & (pipeline == one)
            found |= same & self.known(choice.layout(int(same.argmax()), keeping))
        return found

    def _frontier(self, choice: Choice, *sizes: int) -> list[Recompute]:
        """The sets of modules that no other beats in one of the microbatches, and offload."""
        if choice.least != "none":
            return []
        of, schedules = choice.bounds.family, (choice.schedule,)
        every = (of.frontier(one, self._sets, schedules) for one in sizes)
        return [*dict.fromkeys(itertools.chain(*every)), *self._offload]

    def _try_sets(self, sets: Sequence[Recompute], of: DividedChoice, division: int) -> None:
        self._try_recomputing(of.choice.layout(division, of.keeping), sets)

    def _try_recomputing(self, layout: Layout, sets: Sequence[Recompute]) -> None:
        """A layout with sets of modules, or with offload, with which it may fit."""
        for kind in sets:
            one = self._offloading(layout) if kind == OFFLOAD else replace(layout, recompute=kind)
            if one is not None and self._may_fit(one) and self.accept(one):
                self._try(one, None)

    def _offloading(self, plain: Layout) -> Layout | None:
        """A layout with activations of the fewest blocks in host memory with which it fits.

        More blocks take no less time and no more memory.
        """

        def fits(blocks: int) -> bool:
            layout = replace(plain, recompute="none", offload_blocks=blocks)
            return evaluate(self.problem, layout, compiled_walk()).peak_bytes <= self.memory

        most = self.problem.architecture.layers - 1
        if plain.pipeline > 1 or not fits(most):
            return None
        fewest = 1 + bisect_left(range(1, most), 1, key=fits)
        return replace(plain, recompute="none", offload_blocks=fewest)

    def _try_division(self, of: DividedChoice, division: int) -> None:
        """A division's fitting layout, or those that recompute modules."""
        some, plain = of.some(division), of.choice.layout(division, of.keeping)
        may_keep = plain.recompute == "none" if some is None else some[0] == 0
        sets = self._frontier(of.choice, plain.microbatch) if may_keep else []
        fitting = self._fitting(plain, some)
        if fitting is None or fitting.recompute != "none":
            self._try_recomputing(plain, sets)
            sets = []
        accepted = None if fitting is None else self._accepted(fitting, some)
        if accepted is not None:
            self._try(accepted, some, sets)

    def _fitting(self, layout: Layout, some: tuple[int, int] | None) -> Layout | None:
        """The layout, if it may fit, with the fewest recomputed blocks with which it does.

        ``some`` are the fewest and the most blocks of a stage that may be recomputed.
        """
        if some is None:
            return layout if self._may_fit(layout) else None
        low, most = some
        with_blocks = partial(with_recomputed, layout, most=most)
        place = least_place(range(low, most + 1), lambda blocks: self._may_fit(with_blocks(blocks)))
        return None if place is None else with_blocks(low + place)

    def _accepted(self, layout: Layout, some: tuple[int, int] | None) -> Layout | None:
        """The layout if accepted, else the layout that recomputes all blocks, if accepted."""
        if self.accept(layout):
            return layout
        if some is None:
            return None
        most = with_recomputed(layout, some[1], some[1])
        return most if self.accept(most) else None

    def _may_fit(self, layout: Layout) -> bool:
        return Parts(self.problem, layout).least_bytes <= self.about_memory

    def _try(
        self, layout: Layout, some: tuple[int, int] | None, sets: Sequence[Recompute] = ()
    ) -> None:
        """Steps 4 and 5: evaluate a layout; if it does not fit, more recomputed blocks or sets."""
        if Parts(self.problem, layout).least_seconds >= self.worst:
            return
        found = evaluate(self.problem, layout, compiled_walk())
        self.examined += 1
        if found.peak_bytes <= self.memory:
            if found.seconds < self.worst:
                self._take(found)
            return
        again = 0 if some is None else blocks_recomputed(layout, some[1])
        if some is not None and again < some[1]:
            more = self._accepted(with_recomputed(layout, again + 1, some[1]), some)
            if more is not None:
                self._try(more, some)
        self._try_recomputing(layout, sets)

    def _take(self, found: Estimate) -> None:
        """Put a layout among the best; of layouts that are alike only the fastest stays there."""
        key = self.alike(found.layout)
        same = [one for one in self.best if self.alike(one.layout) == key]
        first, *rest = sorted([found, *same], key=simple_first)
        self.folded += rest
        others = [one for one in self.best if one not in same]
        self.best = sorted([first, *others], key=lambda one: one.seconds)[: self.keep]
