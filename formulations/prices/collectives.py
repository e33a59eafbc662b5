"""Times of transfers and collectives: over a link, over a ring, over the levels of a fabric.

With k ranks, half of a ring all-reduce of n bytes (a reduce-scatter or an all-gather) takes
(k - 1) / k * n / B and k - 1 latencies, where B is the ring's bandwidth (Patarasuk and Yuan 2009;
nccl-tests' "bus bandwidth"). Over several levels, each hop pays the latency of the level that it
crosses. An all-to-all takes what the level takes over which most is sent.

Of several groups at once the slowest decides; their members exchange nothing for no bytes.
Functions above those of groups take numbers or arrays, and kernels compile them.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.machines.groups import CrossedLevels, GroupWays

Amount = TypeVar("Amount", float, Floats)


def link_seconds(moved: Amount, bytes_per_second: float, latency_seconds: float = 0.0) -> Amount:
    """Time of ``moved`` bytes over a link."""
    return moved / bytes_per_second + latency_seconds


def message_price(
    whole: float, samples: int, shares: int, seconds: float | None, bytes_per_second: float | None
) -> float:
    """A device's own time for a message: the largest of ``shares`` of ``samples``.

    All samples together have ``whole`` bytes; None in a price means no time.
    """
    share = whole * -(-samples // shares) / samples
    return link_seconds(share, bytes_per_second or math.inf, seconds or 0.0)


def pace(bytes_per_second: Amount) -> Amount:
    """Seconds per byte of a link, for tables whose entries are multiplied."""
    return 1 / bytes_per_second


def paced_seconds(moved: Amount, seconds_per_byte: Any, latency_seconds: Any) -> Amount:
    """As :func:`link_seconds`, of a link's :func:`pace`, or of as many as there are amounts."""
    seconds: Amount = moved * seconds_per_byte + latency_seconds
    return seconds


def ring_part(ranks: Any, whole: Amount) -> Amount:
    """What each rank passes on in half of a ring all-reduce of a ``whole``."""
    part: Amount = (ranks - 1) / ranks * whole
    return part


def ring_seconds(
    ranks: int,
    moved: Amount,
    bytes_per_second: float,
    latency_seconds: float = 0.0,
    slowdown: float = 1.0,
) -> Amount:
    """Half of a ring all-reduce of ``moved`` bytes; every hop pays ``latency_seconds``.

    ``slowdown`` is by how much the bytes take longer than the link's bandwidth says.
    """
    seconds = ring_part(ranks, moved) / bytes_per_second * slowdown
    return seconds + (ranks - 1) * latency_seconds


def all_reduce_pace(
    ranks: Any, seconds_per_byte: Amount, latency_seconds: Amount
) -> tuple[Amount, Amount]:
    """Seconds per byte and once, for :func:`paced_seconds`, of a whole ring all-reduce."""
    return 2.0 * (ranks - 1) / ranks * seconds_per_byte, 2.0 * (ranks - 1) * latency_seconds


def all_reduce_seconds(of: GroupWays, moved: float) -> float:
    """Time to sum ``moved`` bytes over a group."""
    return 2 * gather_seconds(of, moved)


def gather_seconds(of: GroupWays, moved: float) -> float:
    """Time to all-gather, or to reduce-scatter, ``moved`` bytes (the whole) over a group."""
    passed = ring_part(of.size, moved)
    return _slowest(
        of,
        moved,
        lambda way: link_seconds(passed, way.ring_bytes_per_second, way.ring_latency_seconds),
    )


def all_to_all_seconds(of: GroupWays, moved: float, copies: int | None = None) -> float:
    """Time in which every rank spreads ``moved`` bytes evenly over a group; the slowest level's.

    With ``copies`` every token is sent so often, but only once to each unit (server, rack) that has
    receivers, and copied there.
    """
    others = ring_part(of.size, moved)

    def seconds(way: CrossedLevels) -> float:
        if copies is not None and len(way.crossed) > 1:
            return max(_once_per_unit(of, way, moved, copies)) + way.latency_seconds
        levels = (
            link_seconds(one.share * others, one.level.bytes_per_second) for one in way.crossed
        )
        return max(levels) + way.latency_seconds

    return _slowest(of, moved, seconds)


def _once_per_unit(of: GroupWays, way: CrossedLevels, moved: float, copies: int) -> Iterator[float]:
    """Seconds of every level: all copies inside a unit, one for each unit of those that are left.

    Receivers are as likely in one unit as in another: a unit with w of k members has one for a
    token with probability 1 - (1 - w / k)^copies (DeepSeek-V3, section 3.2.2, limits them further).
    Units with unequally many members count with the mean.
    """
    inside, *outside = way.crossed
    most = 1 + round(inside.share * (of.size - 1))
    yield link_seconds(ring_part(most, moved), inside.level.bytes_per_second)
    units = 1 + sum(one.hops for one in outside)
    for one in outside:
        others = one.hops / (units - one.hops)
        members = one.share * (of.size - 1) / others
        reached = others * (1 - (1 - members / of.size) ** copies)
        yield link_seconds(reached * moved / copies, one.level.bytes_per_second)
        units -= one.hops


def send_seconds(of: GroupWays, moved: float) -> float:
    """Time to send ``moved`` bytes to the next of a group."""
    return _slowest(
        of, moved, lambda way: link_seconds(moved, way.pair_bytes_per_second, way.latency_seconds)
    )


def occupied_seconds(of: GroupWays, moved: float) -> float:
    """Time in which a link to the next of a group is busy with ``moved`` bytes."""
    return _slowest(of, moved, lambda way: link_seconds(moved, way.pair_bytes_per_second))


def _slowest(of: GroupWays, moved: float, seconds: Callable[[CrossedLevels], float]) -> float:
    return max(map(seconds, of.ways), default=0.0) if moved else 0.0
