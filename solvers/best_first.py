"""Branch and bound whose open items are solved in attempts, each longer than the last."""

import heapq
import math
from itertools import count
from time import perf_counter
from typing import Generic, TypeVar

from stagewright.formulations.forms.answers import Limits

PRECISION = 2e-7  # relative; smaller improvements are not searched for
FIRST_SECONDS = 1.0  # time limit of the first attempt at an item
GROWTH = 4.0  # factor of the time limit from one attempt to the next

Item = TypeVar("Item")


class BestFirst(Generic[Item]):
    """A heap of open items, ordered by the number of attempts, then bound, then depth.

    ``cost``: the cost of the best plan so far; items without a lower bound below it are pruned.
    """

    def __init__(self, limits: Limits, cost: float = math.inf) -> None:
        self.limits, self.cost = limits, cost
        self.began = perf_counter()
        self._heap: list[tuple[int, float, int, int, Item]] = []
        self._number = count()
        self._closed = math.inf  # the least bound of all pruned items

    def bound(self) -> float:
        """A lower bound on all plans, at most the cost of the best one."""
        waiting = min((entry[1] for entry in self._heap), default=math.inf)
        return min(self._closed, waiting, self.cost)

    def _depth(self, item: Item) -> int:
        """Sort key among items with equal attempts and bounds: the deepest item comes first."""
        return 0

    def _push(self, bound: float, item: Item, attempt: int = 0) -> None:
        if bound >= self._ceiling():
            self._close(bound)
        else:
            entry = attempt, bound, -self._depth(item), next(self._number), item
            heapq.heappush(self._heap, entry)

    def _pop(self) -> tuple[int, float, Item]:
        """The next item with its number of attempts and its bound."""
        attempt, bound, *_, item = heapq.heappop(self._heap)
        return attempt, bound, item

    def _close(self, bound: float) -> None:
        self._closed = min(self._closed, bound)

    def _ceiling(self) -> float:
        """The cost below which a plan is still searched for."""
        return self.cost * (1 - PRECISION)

    def _left(self) -> float:
        return self.limits.left(perf_counter() - self.began)

    def _seconds(self, attempt: int) -> float:
        """The time limit of an attempt."""
        return min(self._left(), FIRST_SECONDS * GROWTH**attempt)
