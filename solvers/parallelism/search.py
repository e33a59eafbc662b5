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
those of the whole space. Memory prunes at steps 3 and 5.
"""

import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from stagewright.formulations.forms.answers import StopToken, is_stopped
from stagewright.formulations.parallelism.estimate import Estimate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_count
from stagewright.solvers.parallelism.space import Space
from stagewright.solvers.parallelism.tree import Tree

MOST_KEPT = 10_000


@dataclass(frozen=True)
class Found:
    """The best layouts, by time.

    No layout of the space that fits is faster than ``bound``; if ``proved``, the ``best`` are the
    fastest of the space. ``examined`` layouts were evaluated.
    """

    best: tuple[Estimate, ...]
    bound: float
    proved: bool
    examined: int
    seconds: float


def search(
    problem: TrainingProblem,
    space: Space | None = None,
    *,
    keep: int = 10,
    memory_bytes: float | None = None,
    accept: Callable[[Layout], bool] = lambda _: True,
    stop: StopToken | None = None,
) -> Found:
    """The ``keep`` fastest layouts that fit, proved so unless ``stop`` is set first.

    ``memory_bytes`` takes the place of the devices' memory. What ``accept`` refuses is not in the
    space.

    Raises
    ------
    InputError
        If nothing of the space is possible, whatever the memory.
    """
    require_count(keep, "keep", MOST_KEPT)
    started = time.perf_counter()
    tree = Tree(problem, space or Space(), keep, memory_bytes, accept)
    numbers = itertools.count()
    heap = [(bound, next(numbers), part) for bound, part in tree.families()]
    heapq.heapify(heap)
    if not heap:
        raise InputError(f"no degrees of the space are possible: {tree.space.why_none(problem)}")
    while heap and heap[0][0] < tree.worst and not is_stopped(stop):
        _, _, part = heapq.heappop(heap)
        for bound, inner in part():
            if bound < tree.worst:
                heapq.heappush(heap, (bound, next(numbers), inner))
    open_bound = heap[0][0] if heap else math.inf
    return Found(
        best=tuple(sorted(tree.best, key=_simple_first)),
        bound=min(open_bound, tree.best[0].seconds if tree.best else math.inf),
        proved=open_bound >= tree.worst,
        examined=tree.examined,
        seconds=time.perf_counter() - started,
    )


def _simple_first(one: Estimate) -> tuple[float, int, int, str]:
    """By time; of equal ones those with fewer kinds of parallelism."""
    layout = one.layout
    return float(f"{one.seconds:.9g}"), layout.context, layout.expert, layout.placement
