"""Times of collectives among the ranks of a group; of several groups at once, the slowest's.

With k ranks: an all-reduce of n bytes takes 2 (k - 1) / k * n / B, a reduce-scatter or an
all-gather half of it, where B is the bandwidth of a ring; each step of a tree costs a latency. An
all-to-all takes what the level takes over which most is sent. Nothing is sent for no bytes.
"""

import math
from collections.abc import Callable

from stagewright.graphs.machines.groups import Links, Way


def all_reduce_seconds(of: Links, moved: float) -> float:
    """Time to sum ``moved`` bytes over a group."""
    return 2 * gather_seconds(of, moved)


def gather_seconds(of: Links, moved: float) -> float:
    """Time to all-gather, or to reduce-scatter, ``moved`` bytes (the whole) over a group."""
    others, steps = (of.size - 1) / of.size * moved, math.ceil(math.log2(of.size))
    return _slowest(
        of, moved, lambda way: others / way.ring_bytes_per_second + steps * way.latency_seconds
    )


def all_to_all_seconds(of: Links, moved: float) -> float:
    """Time in which every rank spreads ``moved`` bytes evenly over a group; the slowest level's."""
    others = (of.size - 1) / of.size * moved

    def seconds(way: Way) -> float:
        levels = (one.share * others / one.level.bytes_per_second for one in way.crossed)
        return max(levels) + way.latency_seconds

    return _slowest(of, moved, seconds)


def send_seconds(of: Links, moved: float) -> float:
    """Time to send ``moved`` bytes to the next of a group."""
    return _slowest(of, moved, lambda way: moved / way.pair_bytes_per_second + way.latency_seconds)


def occupied_seconds(of: Links, moved: float) -> float:
    """Time in which a link to the next of a group is busy with ``moved`` bytes."""
    return _slowest(of, moved, lambda way: moved / way.pair_bytes_per_second)


def _slowest(of: Links, moved: float, seconds: Callable[[Way], float]) -> float:
    return max(map(seconds, of.ways), default=0.0) if moved else 0.0
