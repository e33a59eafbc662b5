"""The fields of another project's configuration, checked as they are read."""

import math
import reprlib
from collections.abc import Collection
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeAlias

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_LAYERS, require_count
from stagewright.graphs.models.operations import MAX_SIZE

ALIKE = 0.92  # of two names, by difflib's ratio


Field: TypeAlias = tuple[str, Any]
"""A field's name, and its value where a configuration lacks it; ``a|b`` has two names."""

Cell: TypeAlias = str | Field | int | None
"""The name of a required field, a field, or a constant."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a configuration; every error begins with a field's name."""

    values: dict[str, Any]
    sought: set[str] = field(default_factory=set)

    def name(self, cell: Cell) -> str:
        """The name of a cell's field, of several the first that the configuration has."""
        names = str(cell[0] if isinstance(cell, tuple) else cell).split("|")
        return next((one for one in names if one in self.values), names[0])

    def get(self, cell: Cell) -> Any:
        """The value of a cell; remembers the field's name."""
        if not isinstance(cell, str | tuple):
            return cell
        name = self.name(cell)
        self.sought.add(name)
        return self.values.get(name, cell[1] if isinstance(cell, tuple) else None)

    def require_spelling(self) -> None:
        """Refuse an unknown field whose name is almost the name of a known field that is absent."""
        absent = self.sought - self.values.keys()
        for name in self.values:  # in their order: it is the first that is told
            meant = get_close_matches(name, absent, n=1, cutoff=ALIKE)
            if meant and name not in self.sought:
                raise InputError(f"{name} is not a field that is read; is {meant[0]} meant?")

    def size(self, cell: Cell) -> int:
        """A positive integer."""
        value = self.optional_size(cell)
        if value is None:
            name = self.name(cell)
            missing = "is null" if name in self.values else "is missing"
            raise InputError(f"{name} {missing}; it must be a positive integer")
        return value

    def optional_size(self, cell: Cell) -> int | None:
        """A positive integer, or None for null."""
        value = self.get(cell)
        if value is None:
            return None
        name = self.name(cell)
        if type(value) is not int or value < 1:
            raise InputError(f"{name} must be a positive integer, got {reprlib.repr(value)}")
        require_count(value, name, MAX_SIZE)
        return value

    def number(self, cell: Cell) -> int:
        """An integer from 0."""
        value = self.get(cell)
        if type(value) is not int or value < 0:
            name = self.name(cell)
            raise InputError(f"{name} must be an integer from 0, got {reprlib.repr(value)}")
        return value

    def flag(self, cell: Field | bool) -> bool:
        """True or false."""
        value = self.get(cell)
        if not isinstance(value, bool):
            name = self.name(cell)
            raise InputError(f"{name} must be true or false, got {reprlib.repr(value)}")
        return value

    def is_positive(self, cell: Cell) -> bool:
        """Whether a rate of dropout, from 0 to 1, is not 0."""
        value = self.get(cell)
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise InputError(f"{self.name(cell)} must be from 0 to 1, got {reprlib.repr(value)}")
        return bool(value > 0)

    def positive(self, cell: Field) -> float:
        """A number above 0; the default also for null."""
        value = self.get(cell)
        if value is None:
            value = cell[1]
        if type(value) not in (int, float) or not 0 < value < math.inf:
            name = self.name(cell)
            raise InputError(f"{name} must be a number above 0, got {reprlib.repr(value)}")
        return float(value)

    def amount(self, cell: Field) -> float | None:
        """A number from 0, or None for null."""
        value = self.get(cell)
        if value is not None and (type(value) not in (int, float) or not 0 <= value < math.inf):
            raise InputError(
                f"{self.name(cell)} must be a number from 0, got {reprlib.repr(value)}"
            )
        return None if value is None else float(value)

    def layers(self, cell: Cell) -> int:
        """The number of blocks."""
        value = self.size(cell)
        require_count(value, self.name(cell), MAX_LAYERS)
        return value

    def indices(self, name: str, layers: int) -> frozenset[int]:
        """A list of some of the layers, counted from 0; by default empty."""
        value = self.get(name)
        if value is None:
            return frozenset()
        known = range(layers)
        if not isinstance(value, list) or any(type(x) is not int or x not in known for x in value):
            raise InputError(
                f"{name} must be a list of layers from 0 to {layers - 1}, got {reprlib.repr(value)}"
            )
        return frozenset(value)

    def kinds(self, name: str, layers: int, known: Collection[Any]) -> list[Any] | None:
        """A list with one of the ``known`` values for every layer; None for null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != layers:
            raise InputError(f"{name} must be a list of {layers} kinds, one per layer")
        for index, kind in enumerate(value):
            if kind not in known:
                words = " or ".join(map(str, known))
                raise InputError(f"{name}[{index}] must be {words}, got {reprlib.repr(kind)}")
        return value

    def require(self, name: str, wanted: bool) -> None:
        """Refuse a model whose flag is not as ``wanted``: its operators are not counted."""
        if self.get((name, wanted)) not in (wanted, None):
            needed = str(wanted).lower()
            raise InputError(f"{name} must be {needed}: such models are not supported")
