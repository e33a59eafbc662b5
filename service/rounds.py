"""Training by plans that are made from its own measurements: FastT's loop (section 4).

A round carries out a plan for some steps, measures it, learns its costs, and plans again. A plan
whose steps take longer than those of the best so far is given up for that one. The loop ends when
the costs are stable, when planning gives a plan that has been measured, or after ``most`` rounds.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from stagewright.executor.measuring.pairs import Pair
from stagewright.executor.programs.trace import Trace

P = TypeVar("P")
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class TrainingRound(Generic[P, C]):
    """A plan that was carried out.

    Attributes
    ----------
    seconds
        Predicted by the costs that it was planned with, 0 where nothing was known; and the median
        of its steps.
    is_kept
        Whether no plan before it was faster.
    costs
        Those known after the round.
    is_stable
        Whether the round changed little of what was known before it.
    """

    number: int
    plan: P
    seconds: Pair
    is_kept: bool
    costs: C
    is_stable: bool


class TrainingRounds(ABC, Generic[P, C]):
    """What is planned in each round, and what is learned from it.

    ``tolerance`` is the share by which costs may change and still be stable.
    """

    tolerance: float
    most: int

    @property
    @abstractmethod
    def costs(self) -> C:
        """What is known before the first round."""

    @abstractmethod
    def start(self) -> P | None:
        """The first plan; None if none fits in memory."""

    @abstractmethod
    def learned(self, costs: C, plan: P, trace: Trace) -> tuple[C, Pair, bool]:
        """The costs after a run of a plan, its seconds, and whether the costs are stable."""

    @abstractmethod
    def planned(self, costs: C) -> P | None:
        """The best plan for these costs; None if none fits or the search finds none in time."""

    @staticmethod
    @abstractmethod
    def work(plan: P) -> object:
        """What tells two plans apart: what is done, where and in which order."""

    def run(self, first: P, measure: Callable[[P], Trace]) -> Iterator[TrainingRound[P, C]]:
        """The rounds; the last one that is kept has the best plan.

        Parameters
        ----------
        measure
            Carries out a plan for some steps.
        """
        plan, costs, best = first, self.costs, float("inf")
        measured: set[object] = set()
        for number in range(self.most):
            costs, seconds, is_stable = self.learned(costs, plan, measure(plan))
            is_kept = seconds.measured <= best
            best = min(best, seconds.measured)
            measured.add(self.work(plan))
            yield TrainingRound(number, plan, seconds, is_kept, costs, is_stable)
            if is_stable:
                return
            found = self.planned(costs)
            if found is None or self.work(found) in measured:
                return
            plan = found
