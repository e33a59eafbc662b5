"""Times of collectives among the ranks of a group.

With k ranks: an all-reduce of n bytes takes 2 (k - 1) / k * n / B, a reduce-scatter or an
all-gather half of it, where B is the bandwidth of a ring; each step of a tree costs a latency. An
all-to-all takes what the level takes over which most is sent. Nothing is sent for no bytes.
"""

import math

from stagewright.graphs.machines.groups import Links


def all_reduce_seconds(of: Links, moved: float) -> float:
    """Time to sum ``moved`` bytes over a group."""
    return 2 * gather_seconds(of, moved)


def gather_seconds(of: Links, moved: float) -> float:
    """Time to all-gather, or to reduce-scatter, ``moved`` bytes (the whole) over a group."""
    if of.size == 1 or moved == 0:
        return 0.0
    bytes_seconds = (of.size - 1) / of.size * moved / of.ring_bytes_per_second
    return bytes_seconds + math.ceil(math.log2(of.size)) * of.latency_seconds


def all_to_all_seconds(of: Links, moved: float) -> float:
    """Time in which every rank spreads ``moved`` bytes evenly over a group; the slowest level's."""
    if of.size == 1 or moved == 0:
        return 0.0
    others = (of.size - 1) / of.size * moved
    slowest = max(one.share * others / one.level.bytes_per_second for one in of.crossed)
    return slowest + of.latency_seconds


def send_seconds(of: Links, moved: float) -> float:
    """Time to send ``moved`` bytes to the next of a group."""
    if of.size == 1 or moved == 0:
        return 0.0
    return moved / of.pair_bytes_per_second + of.latency_seconds
