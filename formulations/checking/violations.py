"""The checker's findings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: which, where, and what was found. Prints as one line."""

    rule: str
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.place}: {self.message}"
