"""The fields common to all plan documents."""

from abc import ABC, abstractmethod
from dataclasses import dataclass


def relative_gap(one: float, other: float) -> float:
    """The difference of two numbers over the larger one; 0 if both are 0."""
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if largest else 0.0


@dataclass(frozen=True, slots=True)
class Claim:
    """The cost of a plan, the best bound on it in the same unit, and the argument of the bound."""

    cost: float
    bound: float
    proved_by: str

    @property
    def gap(self) -> float:
        """Relative gap of cost and bound, over the larger of the two."""
        return relative_gap(self.cost, self.bound)


@dataclass(frozen=True, slots=True)
class Envelope(ABC):
    """The base of all plan documents: which problem, made by which planner, with which bound.

    Documents name the last two after their kind (planner or policy, iteration seconds or
    objective). ``digest`` identifies the problem.
    """

    digest: str

    @property
    @abstractmethod
    def claim(self) -> Claim | None:
        """The plan's cost and the lower bound on it; None if the document has none."""

    def answers(self, digest: str) -> bool:
        """Whether the plan answers the problem of this digest."""
        return self.digest == digest
