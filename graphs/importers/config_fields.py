"""The fields of another project's configuration, checked as they are read."""

import math
import reprlib
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_LAYERS, require_count
from stagewright.graphs.models.architecture import MAX_SIZE

ALIKE = 0.92  # of two names, by difflib's ratio


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a configuration; every error begins with a field's name."""

    values: dict[str, Any]
    sought: set[str] = field(default_factory=set)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field; remembers its name."""
        self.sought.add(name)
        return self.values.get(name, default)

    def require_spelling(self) -> None:
        """Refuse an unknown field whose name is almost the name of a known field that is absent."""
        absent = self.sought - self.values.keys()
        for name in self.values.keys() - self.sought:
            meant = get_close_matches(name, absent, n=1, cutoff=ALIKE)
            if meant:
                raise InputError(f"{name} is not a field that is read; is {meant[0]} meant?")

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer; required without a default."""
        value = self.optional_size(name, default)
        if value is None:
            missing = "is null" if name in self.values else "is missing"
            raise InputError(f"{name} {missing}; it must be a positive integer")
        return value

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        """A positive integer, or None for null."""
        value = self.get(name, default)
        if value is None:
            return None
        if type(value) is not int or value < 1:
            raise InputError(f"{name} must be a positive integer, got {reprlib.repr(value)}")
        require_count(value, name, MAX_SIZE)
        return value

    def number(self, name: str, default: int) -> int:
        """A field that must be an integer from 0."""
        value = self.get(name, default)
        if type(value) is not int or value < 0:
            raise InputError(f"{name} must be an integer from 0, got {reprlib.repr(value)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A field that must be true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise InputError(f"{name} must be true or false, got {reprlib.repr(value)}")
        return value

    def is_positive(self, name: str, default: float) -> bool:
        """Whether a rate of dropout, from 0 to 1, is not 0."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise InputError(f"{name} must be from 0 to 1, got {reprlib.repr(value)}")
        return bool(value > 0)

    def positive(self, name: str, default: float) -> float:
        """A number above 0; the default also for null."""
        value = self.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise InputError(f"{name} must be a number above 0, got {reprlib.repr(value)}")
        return float(value)

    def layers(self, name: str = "num_hidden_layers") -> int:
        """The number of blocks."""
        value = self.size(name)
        require_count(value, name, MAX_LAYERS)
        return value

    def indices(self, name: str) -> frozenset[int]:
        """A list of layers, counted from 0; by default empty."""
        value = self.get(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or any(type(one) is not int or one < 0 for one in value):
            raise InputError(f"{name} must be a list of layers, got {reprlib.repr(value)}")
        return frozenset(value)

    def refuse(self, name: str) -> None:
        """A flag that must not be set: its operators are not counted."""
        if self.flag(name, False):
            raise InputError(f"{name} must be false: such models are not supported")
