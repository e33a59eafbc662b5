"""Rules of the generators on their numbers of devices, microbatches and stages."""

from stagewright.formulations.schedules.timing import StageTimes
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


def require_stages(times: StageTimes, stages: int) -> None:
    """Refuse times of another number of stages.

    Raises
    ------
    InputError
        With both numbers.
    """
    if len(times.forward) != stages:
        raise InputError(f"the times are of {len(times.forward)} stages, not of {stages}")
