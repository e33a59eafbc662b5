"""Data parallel: the search for k of Algorithm 2."""

from collections.abc import Callable
from dataclasses import dataclass

from stagewright.formulations.backprop.orders import reverse_first_k
from stagewright.formulations.backprop.problem import BackpropProblem, Timetable
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

    It assumes that throughput is about concave in k. With the order
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
