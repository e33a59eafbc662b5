"""Chimera: two pipelines in opposite directions on the same devices (Li and Hoefler 2021)."""

from functools import lru_cache

from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.placements import both_directions
from stagewright.formulations.schedules.published.rules import require_even
from stagewright.formulations.schedules.published.zbv import in_units


@lru_cache(maxsize=8)
def chimera(devices: int, microbatches: int) -> Order:
    """Chimera: even microbatches go down (stage s on device s), odd ones up.

    Units of p microbatches are concatenated directly (section 3.5): the next unit's forwards fill
    the bubbles at the end of a unit. With forwards and backwards of equal time the bubble is
    (p - 2) / (2 m + p - 2) of the makespan if m is a multiple of p (table 2). A device keeps from
    p / 2 + 1 to p microbatches in flight.

    Raises
    ------
    InputError
        If the number of devices or of microbatches is odd.
    """
    require_even("Chimera", "devices", devices)
    require_even("Chimera", "microbatches", microbatches)
    return in_units(both_directions(devices), devices // 2, microbatches)
