"""Blocks and recomputation of every stage: layouts better than layouts with equal stages.

Refined are the plain pipelines (one stage on a rank) among the best layouts of a search, and then
all others whose closed bound (``any_division``) is below the best time, by that bound, until there
is none or so many have been looked at.

The best layouts of a training problem, by branch and bound over all of a space.

A layout is chosen in five steps, each with a lower bound on the time of all layouts below it:

1. how layers are divided (t, c, e, sequence parallelism): the work of a sample in the largest
   microbatch, without recomputation, spread evenly over all ranks;
2. schedule and recomputation: for every microbatch and number of ranks the closed bound on all
   divisions of the blocks (``any_division``); where that is below the k-th best time, for every
   pipeline (with chunks and ends) and rank r the time to reach it and to return from it, and all
   its work: fill_r + m w_r (no rank computes before its first input, and after its last backward
   those of the stages before it follow); the least;
3. ZeRO, offload, placement and pipeline: the same with the fewest recomputed blocks, what ZeRO's
   exchanges add to the work beside them, the sum of gradients of the first rank and the update;
4. the same bound of one layout, not of its layers at the least (``Parts.least_seconds``);
5. the time of the layout itself (``estimate.evaluate``).

Nodes are taken by their bound. When the least bound is not below the k-th best time, the best k are
those of the whole space. Memory prunes at all steps but the first. Pipelines whose stages are not
nearly even (``divisions``) are many, alike in time, and seldom the best: step 2 takes them last,
and looks at so many only for what comes after the best. At the very start the least bounds are
followed down to a first layout, whose time rules out arrays of others.
"""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Literal

from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_count
from stagewright.graphs.models.shards import Recompute
from stagewright.solvers.parallelism.any_division import Plain, any_division
from stagewright.solvers.parallelism.family import simply_placed
from stagewright.solvers.parallelism.space import (
    Counts,
    Space,
    StageOptions,
    divided_evenly,
    simple_first,
)
from stagewright.solvers.parallelism.stage_search import BlockDivision, StageSearch
from stagewright.solvers.parallelism.tree import Part, Tree, compiled_walk

Heap = list[tuple[float, int, Part]]
_MOST_KEPT = 10_000
_MOST_FOR_THE_LIST = 1000
"""Postponed parts that may hold no faster layout than the first, opened for others of the list."""

_MOST_DIVED = 32
"""Parts opened for a first layout, whose time rules out others, before the search by bounds."""

_MOST_DIVING = 1.0
"""Seconds after a stop in which a first layout is looked for, if none was found."""


@dataclass(frozen=True)
class FoundLayouts:
    """The best layouts, by time.

    No layout of the space that fits is faster than ``bound``; if ``proved``, the first of the
    ``best`` is the fastest, or none fits. The first ``fastest`` of them are the fastest of the
    space. ``examined`` layouts were evaluated; ``folded`` are those of them that fit and are like
    one of the best, but slower. No layout of the space that is in neither list is faster than
    ``others``.
    """

    best: tuple[Estimate, ...]
    folded: tuple[Estimate, ...]
    bound: float
    proved: bool
    fastest: int
    others: float
    examined: int
    seconds: float


def search(
    problem: TrainingProblem,
    space: Space | None = None,
    *,
    keep: int = 10,
    memory_bytes: float | None = None,
    accept: Callable[[Layout], bool] = lambda _: True,
    alike: Callable[[Layout], Hashable] = lambda layout: layout,
    known: Callable[[Layout], bool] | None = None,
    stop: StopToken | None = None,
) -> FoundLayouts:
    """The ``keep`` fastest layouts that fit, of which ``FoundLayouts.fastest`` are proved to be so.

    The first is proved unless ``stop`` is set. ``memory_bytes`` takes the place of the devices'
    memory. What ``accept`` refuses is not in the space. Neither is what ``known`` refuses, by the
    degrees, the placement and ZeRO's stage alone: the search does not divide it further. Of layouts
    for which ``alike`` is equal only the fastest is kept. If ``stop`` is set before any layout is
    found, a first one is looked for.

    Raises
    ------
    InputError
        If nothing of the space is possible, whatever the memory.
    """
    require_count(keep, "keep", _MOST_KEPT)
    started = time.perf_counter()
    tree = Tree(problem, space or Space(), keep, memory_bytes, accept, alike, known)
    numbers = itertools.count()
    heap = [(bound, next(numbers), part) for bound, part in tree.families()]
    heapq.heapify(heap)
    if not heap:
        raise InputError(f"no degrees of the space are possible: {tree.space.why_none(problem)}")
    if tree.space.least_bytes(problem) > tree.about_memory:
        heap.clear()
    left = iter(range(_MOST_DIVED))
    _dive(heap, tree, numbers, lambda: is_stopped(stop) or next(left, None) is None)
    for part in _open_parts(heap, tree, numbers, stop):
        for bound, inner in part():
            if bound < tree.worst:
                heapq.heappush(heap, (bound, next(numbers), inner))
    open_bound = min([math.inf, *(one[0] for one in heap[:1]), *(one[0] for one in tree.postponed)])
    if not tree.best:
        end = time.perf_counter() + _MOST_DIVING
        _dive(heap, tree, numbers, lambda: time.perf_counter() >= end)
    best = tuple(sorted(tree.best, key=simple_first))
    kept = {alike(one.layout) for one in best}
    return FoundLayouts(
        best=best,
        folded=tuple(one for one in tree.folded if alike(one.layout) in kept),
        bound=min([open_bound, *(one.seconds for one in (*best, *tree.folded))]),
        proved=open_bound >= tree.least,
        fastest=sum(one.seconds <= open_bound for one in best),
        others=min(open_bound, tree.worst),
        examined=tree.examined,
        seconds=time.perf_counter() - started,
    )


def _open_parts(
    heap: Heap, tree: Tree, numbers: Iterator[int], stop: StopToken | None
) -> Iterator[Part]:
    """Parts of the tree that may hold one of the best layouts, by bound; postponed parts last."""
    are_late, left = False, _MOST_FOR_THE_LIST
    while not is_stopped(stop):
        if not heap or heap[0][0] >= tree.worst:
            if not tree.postponed:
                return
            for bound, part in tree.postponed:
                heapq.heappush(heap, (bound, next(numbers), part))
            tree.postponed.clear()
            are_late = True
            continue
        if are_late and heap[0][0] >= tree.least:
            left -= 1
            if left < 0:
                return
        yield heapq.heappop(heap)[2]


def _dive(heap: Heap, tree: Tree, numbers: Iterator[int], is_over: Callable[[], bool]) -> None:
    """Follow the least bounds downwards to a first layout that fits, unless it ``is_over`` before.

    All other parts stay in the heap.
    """
    heap.sort(reverse=True)
    while heap and not tree.best and not is_over():
        parts = heap.pop()[2]()
        found = [(bound, next(numbers), part) for bound, part in parts if bound < math.inf]
        heap += sorted(found, reverse=True)
    heapq.heapify(heap)


def work_alike(layout: Layout) -> Hashable:
    """The same for layouts whose ranks do the same work at other places.

    They differ only in placement, or in whether c x d ranks divide the tokens of samples or take
    samples of their own: as many tokens of a microbatch (b / c) and as many microbatches.
    """
    data = layout.context * layout.data
    same = replace(layout, placement="data-inside", context=1, data=data, microbatch=1)
    return same, layout.microbatch / layout.context


Recomputation = Literal["any", "whole", "alike"]
"""How many blocks stages may recompute: each any number, each all or none, all the same number."""

_MOST_EXAMINED = 64
ROUNDING = 1e-12  # sums of bytes in another order must not rule out what fits to the last bit


@dataclass(frozen=True, slots=True)
class Refined:
    """A layout with blocks and recomputation of every stage; none such is faster than ``bound``.

    Its other choices are those of ``before``, the time with stages that are alike, if that is
    among the best of the search.
    """

    estimate: Estimate
    before: float | None
    bound: float


@dataclass(frozen=True, slots=True)
class Refinement:
    """The best refined layouts by time, and lower bounds on the time of all layouts.

    ``plain_bound`` holds for all plain pipelines of the space with any division of the blocks and
    the fewest recomputed blocks of every stage; ``bound`` for interleaved pipelines of any division
    too. ``examined`` layouts were divided.
    """

    best: tuple[Refined, ...]
    plain_bound: float
    bound: float
    examined: int
    seconds: float


def refine(
    problem: TrainingProblem,
    space: Space,
    found: FoundLayouts,
    *,
    recomputation: Recomputation = "any",
    accept: Callable[[Layout], bool] = lambda _: True,
    stop: StopToken | None = None,
) -> Refinement:
    """Faster layouts whose stages differ: at most as many as the search found, or one."""
    started = time.perf_counter()
    if space.least_bytes(problem) > problem.fabric.memory_bytes * (1 + RELATIVE_TOLERANCE):
        return Refinement((), plain_bound=inf, bound=inf, examined=0, seconds=0.0)
    of = _Refining(problem, space, found, recomputation, accept)
    of.answered()
    plain_bound = of.others(stop)
    best = min((one.estimate.seconds for one in of.refined), default=of.least)
    plain_bound = min(plain_bound, of.open_bound, best, of.least)
    if not found.proved:
        plain_bound = min(plain_bound, found.bound)
    return Refinement(
        best=tuple(
            sorted(of.refined, key=lambda one: one.estimate.seconds)[: len(found.best) or 1]
        ),
        plain_bound=plain_bound,
        bound=min(plain_bound, of.candidates.interleaved()),
        examined=of.examined,
        seconds=time.perf_counter() - started,
    )


class _Refining:
    """The layouts refined so far; ``least`` is the best time."""

    def __init__(
        self,
        problem: TrainingProblem,
        space: Space,
        found: FoundLayouts,
        recomputation: Recomputation,
        accept: Callable[[Layout], bool],
    ) -> None:
        self.problem, self.space, self.found = problem, space, found
        self.recomputation, self.accept = recomputation, accept
        self.candidates = any_division(problem, space, problem.fabric.memory_bytes)
        self.refined: list[Refined] = []
        self.done: set[Layout] = set()
        self.open_bound, self.examined = inf, 0
        self.least = min((one.seconds for one in found.best), default=inf)

    def answered(self) -> None:
        """Refine the best layouts of the search; each refinement must be faster than its layout."""
        for one in self.found.best:
            layout = one.layout
            if layout.chunks > 1 or layout.pipeline == 1 or layout.form.in_v:
                continue
            for kind in self._kinds(layout.recompute):
                self._refine(replace(_base(layout), recompute=kind), one.seconds, one.seconds)

    def others(self, stop: StopToken | None) -> float:
        """Refine all other layouts that may be the best; return a bound on the remaining ones."""
        left = _MOST_EXAMINED
        for plain in self.candidates.plain(lambda: self.least):
            if not left or is_stopped(stop):
                return plain.bound
            for layout in self._layouts(plain):
                left -= self._refine(layout, self.least, None)
        return inf

    def _layouts(self, plain: Plain) -> Iterator[Layout]:
        # What is refused with nothing recomputed is refused for another feature.
        if self.accept(divided_evenly(plain.layout, self.problem.architecture.layers)):
            for kind in self._kinds("none"):
                yield replace(plain.layout, recompute=kind)

    def _kinds(self, now: Recompute) -> list[Recompute]:
        """The kinds of recomputation for blocks: the layout's kind, or any kind of the space."""
        if now != "none":
            return [now]
        possible = self.space.recomputes(self.problem)
        others = [one for one in possible if one != "none"]
        return others or [one for one in possible if one == now]

    def _refine(self, base: Layout, below: float, before: float | None) -> int:
        """Divide the blocks of a new layout; return the number of divisions examined."""
        alike = simply_placed(self.problem, base)
        if alike in self.done:
            return 0
        self.done.add(alike)
        self.examined += 1
        best: Estimate | None = None
        bound = inf
        for counts in self._counts(base):
            one, least = self._divided(base, counts, below)
            bound = min(bound, least)
            if one is not None:
                best, below = one, one.seconds
        if bound < below:
            self.open_bound = min(self.open_bound, bound)
        if best is not None:
            self.refined.append(Refined(best, before, min(bound, best.seconds)))
            self.least = min(self.least, best.seconds)
        return 1

    def _divided(self, base: Layout, counts: Counts, below: float) -> tuple[Estimate | None, float]:
        """The best accepted division below a time, and a bound on all divisions."""
        walk = compiled_walk()
        memory = self.problem.fabric.memory_bytes * (1 + ROUNDING)
        options = StageOptions(self.problem, base, memory, counts, walk)
        found = StageSearch(options, walk, below).run()
        if found.best is None:
            return None, found.bound
        layout = _refined_layout(base, found.best)
        if not self.accept(layout):
            return None, found.bound
        one = evaluate(self.problem, layout, walk)
        return one if one.fits else None, found.bound

    def _counts(self, base: Layout) -> Iterator[Counts]:
        """Allowed numbers of recomputed blocks in a stage of so many blocks."""
        if base.recompute == "none":
            yield lambda _: (0,)
            return
        least = 0 if "none" in self.space.recompute else 1
        if self.recomputation == "alike":
            yield from _alike(least, self._most_alike(base))
        elif self.recomputation == "whole" or not self.space.partial:
            yield lambda count: (0, count) if count and not least else (count,)
        else:
            yield lambda count: range(min(least, count), count + 1)

    def _most_alike(self, base: Layout) -> int:
        """The largest number that all stages recompute and that is not all blocks."""
        if base.recompute != "full" or not self.space.partial:
            return 0
        return -(-self.problem.architecture.layers // base.pipeline)


def _alike(least: int, most: int) -> Iterator[Counts]:
    for again in range(least, most + 1):
        yield lambda count, again=again: (min(again, count),)  # type: ignore[misc]
    yield lambda count: (count,)


def _base(layout: Layout) -> Layout:
    """The layout without the fields that a refinement sets."""
    names = {"recompute_blocks", "first_blocks", "last_blocks"}
    names |= {"blocks_by_stage", "recomputed_by_stage"}
    plain = {one.name: one.default for one in fields(layout) if one.name in names}
    return replace(layout, **plain)  # type: ignore[arg-type]


def _refined_layout(base: Layout, found: BlockDivision) -> Layout:
    """The layout with a division, and recomputation in the simplest field that expresses it."""
    blocks, again = found.blocks, found.recomputed
    layout = replace(base, blocks_by_stage=blocks)
    if not any(again):
        return replace(layout, recompute="none")
    if again == blocks:
        return layout
    most = max(again)
    if base.recompute == "full" and again == tuple(min(most, count) for count in blocks):
        return replace(layout, recompute_blocks=most)
    return replace(layout, recomputed_by_stage=again)
