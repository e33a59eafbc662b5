"""The best layouts of a training problem, by branch and bound over all of a space.

A layout is chosen in five steps, each with a lower bound on the time of all layouts below it:

1. how layers are divided (t, c, e, sequence parallelism): the work of a sample in the largest
   microbatch, without recomputation, spread evenly over all ranks;
2. microbatch and recomputation: the same with their times, since p d = N / (t c) whatever p is;
3. schedule: for every pipeline (with chunks and ends) and every rank r the time to reach it and to
   return from it, and all its work: fill_r + m w_r (no rank computes before its first input, and
   after its last backward those of the stages before it follow); the least of all pipelines.
   Then ZeRO, offload and pipeline: the same with the fewest recomputed blocks, ZeRO's exchanges,
   the sum of gradients of the first rank and the update;
4. placement: the same bound of one layout, not of its layers at the least
   (``Parts.least_seconds``);
5. the time of the layout itself (``estimate.evaluate``).

Nodes are taken by their bound. When the least bound is not below the k-th best time, the best k are
those of the whole space. Memory prunes at steps 3 and 5. Pipelines whose stages are not nearly even
(``divisions``) are many, alike in time, and seldom the best: step 3 takes them last, with groups of
them as nodes (``uneven``), and looks at so many only for what comes after the best.
"""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.formulations.parallelism.estimate import Estimate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_count
from stagewright.solvers.parallelism.space import Space
from stagewright.solvers.parallelism.tree import Part, Tree, simple_first

Heap = list[tuple[float, int, Part]]
_MOST_KEPT = 10_000
_MOST_FOR_THE_LIST = 1000
"""Postponed parts that may hold no faster layout than the first, opened for others of the list."""

MOST_STEPS = 1000
"""Parts of the space that are opened after a stop to find a first layout: about 0.1 s."""


@dataclass(frozen=True)
class Found:
    """The best layouts, by time.

    No layout of the space that fits is faster than ``bound``; if ``proved``, the first of the
    ``best`` is the fastest, or none fits. The first ``fastest`` of them are the fastest of the
    space. ``examined`` layouts were evaluated; ``folded`` are those of them that fit and are like
    one of the best, but slower.
    """

    best: tuple[Estimate, ...]
    folded: tuple[Estimate, ...]
    bound: float
    proved: bool
    fastest: int
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
    stop: StopToken | None = None,
) -> Found:
    """The ``keep`` fastest layouts that fit, of which ``Found.fastest`` are proved to be so.

    The first is proved unless ``stop`` is set. ``memory_bytes`` takes the place of the devices'
    memory. What ``accept`` refuses is not in the space. Of layouts for which ``alike`` is equal
    only the fastest is kept. If ``stop`` is set before any layout is found, a first one is looked
    for.

    Raises
    ------
    InputError
        If nothing of the space is possible, whatever the memory.
    """
    require_count(keep, "keep", _MOST_KEPT)
    started = time.perf_counter()
    tree = Tree(problem, space or Space(), keep, memory_bytes, accept, alike)
    numbers = itertools.count()
    heap = [(bound, next(numbers), part) for bound, part in tree.families()]
    heapq.heapify(heap)
    if not heap:
        raise InputError(f"no degrees of the space are possible: {tree.space.why_none(problem)}")
    for part in _open_parts(heap, tree, numbers, stop):
        for bound, inner in part():
            if bound < tree.worst:
                heapq.heappush(heap, (bound, next(numbers), inner))
    open_bound = min([math.inf, *(one[0] for one in heap[:1]), *(one[0] for one in tree.postponed)])
    if not tree.best:
        _dive(heap, tree)
    best = tuple(sorted(tree.best, key=simple_first))
    kept = {alike(one.layout) for one in best}
    return Found(
        best=best,
        folded=tuple(one for one in tree.folded if alike(one.layout) in kept),
        bound=min([open_bound, *(one.seconds for one in (*best, *tree.folded))]),
        proved=open_bound >= tree.least,
        fastest=sum(one.seconds <= open_bound for one in best),
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


def _dive(heap: Heap, tree: Tree) -> None:
    """Follow the least bounds downwards to a first layout that fits, in not too many steps."""
    open_ = [part for _, _, part in sorted(heap, reverse=True)]
    for _ in range(MOST_STEPS):
        if not open_ or tree.best:
            return
        children = sorted(open_.pop()(), key=lambda one: one[0], reverse=True)
        open_ += [part for _, part in children]


def work_alike(layout: Layout) -> Hashable:
    """The same for layouts whose ranks do the same work at other places.

    They differ only in placement, or in whether c x d ranks divide the tokens of samples or take
    samples of their own: as many tokens of a microbatch (b / c) and as many microbatches.
    """
    data = layout.context * layout.data
    same = replace(layout, placement="data-inside", context=1, data=data, microbatch=1)
    return same, layout.microbatch / layout.context
