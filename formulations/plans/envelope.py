"""What every plan document tells, whatever kind of plan it holds."""

from abc import ABC, abstractmethod
from dataclasses import dataclass


def relative_gap(one: float, other: float) -> float:
    """The distance of two figures over the larger of them; 0 where both are 0."""
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if largest else 0.0


@dataclass(frozen=True, slots=True)
class Claim:
    """The cost of a plan, the best bound on its cost, and who proved that; in the same unit."""

    cost: float
    bound: float
    proved_by: str

    @property
    def gap(self) -> float:
        """Their distance over the larger of the two, which of a least cost is the cost."""
        return relative_gap(self.cost, self.bound)


@dataclass(frozen=True, slots=True)
class Envelope(ABC):
    """The base of all plan documents: the problem that they answer, who made them, how good.

    Documents spell the last two in the words of their kind (planner or policy, iteration seconds
    or objective). ``digest`` names the problem.
    """

    digest: str

    @property
    @abstractmethod
    def made_by(self) -> str:
        """The planner or the policy."""

    @property
    @abstractmethod
    def claim(self) -> Claim | None:
        """What the plan costs at least and at most; None if that is not told."""

    def answers(self, digest: str) -> bool:
        """Whether the plan answers the problem of this digest."""
        return self.digest == digest
