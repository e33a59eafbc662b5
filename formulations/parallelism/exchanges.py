"""Times of collectives on a fabric, of groups of ranks at equal distances.

With k ranks: an all-reduce of n bytes takes 2 (k - 1) / k * n / B, a reduce-scatter or an
all-gather half of it, an all-to-all (k - 1) / k * n / B, where B is the bandwidth of the slowest
link that is used; each step of a tree costs the latency of that link.
"""

import math

from stagewright.graphs.machines.fabric import Fabric


def all_reduce_seconds(fabric: Fabric, stride: int, size: int, moved: float) -> float:
    """Time to sum ``moved`` bytes over a group."""
    return 2 * gather_seconds(fabric, stride, size, moved)


def gather_seconds(fabric: Fabric, stride: int, size: int, moved: float) -> float:
    """Time to all-gather, or to reduce-scatter, ``moved`` bytes (the whole) over a group."""
    if size == 1:
        return 0.0
    bandwidth, latency = fabric.path(stride, size)
    return (size - 1) / size * moved / bandwidth + math.ceil(math.log2(size)) * latency


def all_to_all_seconds(fabric: Fabric, stride: int, size: int, moved: float) -> float:
    """Time in which every rank spreads ``moved`` bytes evenly over a group; the slowest level's."""
    if size == 1:
        return 0.0
    levels = fabric.crossing(stride, size)
    others = (size - 1) / size * moved
    return (
        max(share * others / bandwidth for share, bandwidth in levels)
        + (fabric.path(stride, size)[1])
    )


def send_seconds(fabric: Fabric, stride: int, size: int, moved: float) -> float:
    """Time to send ``moved`` bytes to the next of a group: over the outermost level it crosses."""
    if size == 1:
        return 0.0
    bandwidth = fabric.crossing(stride, size)[-1][1]
    return moved / bandwidth + fabric.path(stride, size)[1]
