"""The fields common to all plan documents."""

from dataclasses import dataclass


def relative_gap(one: float, other: float) -> float:
    """The difference of two numbers over the larger one; 0 if both are 0."""
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if largest else 0.0


@dataclass(frozen=True, slots=True)
class Envelope:
    """The base of all plan documents: ``digest`` identifies the problem that the plan answers."""

    digest: str

    def answers(self, digest: str) -> bool:
        """Whether the plan answers the problem of this digest."""
        return self.digest == digest
