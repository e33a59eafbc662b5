"""GPipe: all forwards, then all backwards (Huang et al. 2019)."""

from functools import lru_cache

from stagewright.formulations.plans.actions import Action
from stagewright.formulations.schedules.order import B, F, Order, order_of
from stagewright.formulations.schedules.placements import loop


@lru_cache(maxsize=8)
def breadth_first(devices: int, chunks: int, microbatches: int) -> Order:
    """Looped GPipe: stage s is on device s mod p; every stage keeps all microbatches in flight.

    A device does all forwards of its first stage, then all of its second; backwards are in reverse,
    the last microbatch first. With m >= p microbatches the bubble is (p - 1) / (v m) of the work
    (section 4.2).
    """
    stages = range(devices * chunks)
    forwards = [Action(s, F, m) for s in stages for m in range(microbatches)]
    backwards = [Action(s, B, m) for s in reversed(stages) for m in reversed(range(microbatches))]
    return order_of(loop(devices, chunks), forwards + backwards)


@lru_cache(maxsize=8)
def gpipe(device: tuple[int, ...], microbatches: int) -> Order:
    """GPipe's order with stage s on ``device[s]``; every stage keeps all microbatches in flight."""
    stages = range(len(device))
    forwards = [Action(s, F, m) for s in stages for m in range(microbatches)]
    backwards = [Action(s, B, m) for s in reversed(stages) for m in range(microbatches)]
    return order_of(device, forwards + backwards)
