"""The checker's findings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: its name, the place, and the values found. Prints as one line."""

    rule: str
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.place}: {self.message}"
