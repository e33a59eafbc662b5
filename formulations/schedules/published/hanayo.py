"""Hanayo: stages in waves over the devices (Liu et al. 2023)."""

from functools import lru_cache

from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.placements import wave
from stagewright.formulations.schedules.published.zbv import in_units


@lru_cache(maxsize=8)
def hanayo(devices: int, waves: int, microbatches: int) -> Order:
    """Hanayo with 2 w stages per device, in units of p microbatches.

    With one wave it is Chimera on twice the devices, folded at the middle: both directions become
    the two ways of one V, and no stage has two copies (section 3.2). With forwards and backwards of
    equal time a device is idle for 2 p - 2 slots, of a stage's forward or backward each, if m is a
    multiple of p: (2 p - 2) / (4 w m + 2 p - 2) of the makespan.
    """
    return in_units((wave(devices, waves),), devices, microbatches)
