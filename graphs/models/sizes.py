"""Sizes of models: what is counted is from 1 to a bound."""

from dataclasses import fields

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_count

MAX_SIZE = 10**9  # of anything that is counted: far above any model, products fit in a float


def require_sizes(record: object) -> None:
    """Every integer of a dataclass is from 1 to MAX_SIZE; zero is spelled None."""
    for one in fields(record):  # type: ignore[arg-type]
        value = getattr(record, one.name)
        if isinstance(value, int) and not isinstance(value, bool):
            require_number(value, one.name)


def require_number(value: int, name: str) -> None:
    """Raise InputError unless a size is from 1 to MAX_SIZE."""
    if value < 1:
        raise InputError(f"{name} must be at least 1, got {value}")
    require_count(value, name, MAX_SIZE)
