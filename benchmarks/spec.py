"""What a benchmark sweeps over."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Case = TypeVar("Case")
Built = TypeVar("Built")


@dataclass(frozen=True, slots=True)
class BenchSpec(Generic[Case, Built]):
    """``build`` makes the problem of each case of ``sweep``; the first ``few`` are quick."""

    name: str
    build: Callable[[Case], Built]
    sweep: tuple[Case, ...]
    few: int = 2

    def cases(self, quick: bool) -> tuple[Case, ...]:
        """All cases, or a few small ones."""
        return self.sweep[: self.few] if quick else self.sweep
