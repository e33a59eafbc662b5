"""GPipe: all forwards, then all backwards (Huang et al. 2019)."""

from functools import lru_cache

from stagewright.formulations.plans.actions import Action
from stagewright.formulations.schedules.order import B, F, Order, order_of


@lru_cache(maxsize=8)
def gpipe(device: tuple[int, ...], microbatches: int) -> Order:
    """GPipe's order with stage s on ``device[s]``; every stage keeps all microbatches in flight."""
    stages = range(len(device))
    forwards = [Action(s, F, m) for s in stages for m in range(microbatches)]
    backwards = [Action(s, B, m) for s in reversed(stages) for m in range(microbatches)]
    return order_of(device, forwards + backwards)
