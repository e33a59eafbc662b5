"""Data parallel: the search for k of Algorithm 2, every k, and the other systems' schedules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stagewright.formulations.backprop.orders import conventional, reverse_first_k
from stagewright.formulations.backprop.problem import BackpropProblem, Timetable
from stagewright.formulations.backprop.synchronisation import (
    DDP_BUCKET,
    DDP_FIRST_BUCKET,
    HOROVOD_FUSION,
    SyncLink,
    after_backward,
    buckets,
    by_layer,
    in_buckets,
    in_chunks,
)
from stagewright.formulations.backprop.training import Layers
from stagewright.graphs.documents.arrays import Ints
from stagewright.solvers.backprop.list_scheduling import list_schedule


@dataclass(frozen=True, slots=True, eq=False)
class ReversedLayers:
    """The best ``k`` that was tried, its timetable, and how many values were tried."""

    k: int
    timetable: Timetable
    tried: int


Order = Callable[[BackpropProblem, int], Ints]


def reverse_search(
    problem: BackpropProblem, most: int, order: Order = reverse_first_k
) -> ReversedLayers:
    """Section 5.1's search for k from 0 to ``most``: a grid, halved around its best value.

    It assumes that throughput is about concave in k; :func:`every_k` does not. With the order
    ``fast_forward`` it finds k of section 6, which the paper leaves open: of data and pipeline
    parallelism together, the first k layers are reversed and the others fast-forwarded.
    """
    found: dict[int, Timetable] = {}

    def time(k: int) -> float:
        if k not in found:
            found[k] = list_schedule(problem, order(problem, k))
        return found[k].end

    step = max(1, most // 10)
    best = min((*range(0, most, step), most), key=time)
    while step > 1:
        low, high = max(0, best - step), min(most, best + step)
        step = (step + 1) // 2
        best = min((best, *range(low, high + 1, step)), key=time)
    return ReversedLayers(best, found[best], len(found))


def every_k(problem: BackpropProblem, most: int, order: Order = reverse_first_k) -> ReversedLayers:
    """The best k from 0 to ``most``; among equally good values the least."""
    times = [list_schedule(problem, order(problem, k)) for k in range(most + 1)]
    k = min(range(most + 1), key=lambda k: times[k].end)
    return ReversedLayers(k, times[k], most + 1)


Baseline = Callable[[Layers, Sequence[float], SyncLink], BackpropProblem]


def _ddp(layers: Layers, amounts: Sequence[float], link: SyncLink) -> BackpropProblem:
    groups = buckets(amounts, DDP_BUCKET, DDP_FIRST_BUCKET)
    return in_buckets(layers, amounts, link, groups)


def _horovod(layers: Layers, amounts: Sequence[float], link: SyncLink) -> BackpropProblem:
    return in_buckets(layers, amounts, link, buckets(amounts, HOROVOD_FUSION))


# Each with whether messages are sent first come, first served; else the first layers go first.
BASELINES: dict[str, tuple[Baseline, bool]] = {
    "after backward": (after_backward, True),
    "wait-free": (by_layer, True),
    "DDP": (_ddp, True),
    "Horovod": (_horovod, True),
    "BytePS": (in_chunks, False),
}


def baseline(
    name: str, layers: Layers, amounts: Sequence[float], link: SyncLink
) -> tuple[BackpropProblem, Timetable]:
    """A system's problem and schedule: layer by layer, ``amounts`` bytes of gradients per layer.

    Horovod's fusion is by bytes alone, as if its cycle time never ended a buffer early.
    """
    build, is_queue = BASELINES[name]
    problem = build(layers, amounts, link)
    queues = ("sync",) if is_queue else ()
    return problem, list_schedule(problem, conventional(problem), queues)
