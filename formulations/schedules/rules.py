"""Rules of the generators on their numbers of devices and microbatches."""

from stagewright.graphs.documents.errors import InputError


def require_even(schedule: str, name: str, count: int) -> None:
    """Refuse an odd ``count``.

    Raises
    ------
    InputError
        With the nearest counts that work.
    """
    if count % 2:
        near = f"{count - 1} or {count + 1}" if count > 1 else "2"
        raise InputError(
            f"{schedule} needs an even number of {name}, got {count}; the nearest are {near}"
        )


def require_at_least(schedule: str, name: str, count: int, least: int) -> None:
    """Refuse a ``count`` below ``least``.

    Raises
    ------
    InputError
        With the least count that works.
    """
    if count < least:
        raise InputError(f"{schedule} needs at least {least} {name}, got {count}")
