"""What passes a device's memory: any bytes, and those of the optimizer's step."""

from stagewright.formulations.prices.collectives import Amount, link_seconds
from stagewright.graphs.machines.devices import Accelerator


def memory_seconds(moved: Amount, card: Accelerator, reached: float) -> Amount:
    """Time to read or write ``moved`` bytes, at the ``reached`` part of the memory's bandwidth."""
    return link_seconds(moved, card.memory_bytes_per_second * reached)


def update_bytes(weight: float, gradient: float, optimizer: float, *, masters: bool) -> float:
    """What the optimizer's step moves, from what is held, in bytes per parameter or any other unit.

    It reads gradients and state and writes state and weights; without ``masters`` of the weights in
    the state it reads the weights too.
    """
    return gradient + 2 * optimizer + weight + (0 if masters else weight)
